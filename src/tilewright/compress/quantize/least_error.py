"""Scales of a weight's groups by least squared error, in place of the smallest that clips nothing.

With four bits a few clipped values may cost less than coarse steps for all. A group's scale is searched among shares of
its largest magnitude; for the codes of each, the scale that fits them best (least squares) is tried too. The scale of
the range is among the candidates, so no group gets worse, and so is Q4_0's own (the largest magnitude at the code -8)
where scales may be negative: the side that reaches further then has the lowest code, which lies one step further out.

Mean squared error in groups of 32 of normal numbers, over that of llama.cpp's Q4_0: range 1.14, search 1.00, with
negative scales 0.89.

Legend: M rows  G groups of a row  C columns of a group.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.integer import IntegerTensor, IntSpec, encode_integer, half_scale, scale_of_range, tile_range
from tilewright.formats.scaling import Tile

SHARES = (0.87, 0.95, 1.02, 1.1, 1.18, 1.26, 1.34)
"""Of the highest code: which code the largest magnitude of a group would have, were it not clipped."""
_MOST_ELEMENTS = 2**22
"""Of one pass: what is kept beside the weight is a few times as much."""


def round_to_least_error(
    weight_MK: Tensor, spec: IntSpec, tile: Tile, *, half: bool = False, negative: bool = False
) -> IntegerTensor:
    """Quantise a weight symmetrically to the codes and scales of least error.

    Args:
        weight_MK: float; a group with a value that is not finite gets the scale NaN.
        spec: the format.
        tile: `Tile(1, group)`, or `Tile(1, 0)` for one scale per row.
        half: scales are numbers of FP16.
        negative: scales may be negative.

    Example:
        >>> from tilewright.formats.integer import INT4
        >>> weight = torch.tensor([[8.0, -3.0, 1.0, -0.0]])
        >>> round_to_least_error(weight, INT4, Tile(1, 0), negative=True).dequantize().tolist()
        [[8.0, -3.0, 1.0, -0.0]]
    """
    weight = weight_MK.detach().to(torch.float32)
    rows = max(1, _MOST_ELEMENTS // max(weight.shape[1], 1))
    scale = torch.cat(
        [least_error_scale(part, spec, tile, half=half, negative=negative) for part in weight.split(rows)]
    )
    return IntegerTensor(encode_integer(weight, scale, None, tile, spec), scale, None, tile, spec)


def least_error_scale(
    weight_MK: Tensor, spec: IntSpec, tile: Tile, *, half: bool = False, negative: bool = False
) -> Tensor:
    """The scales of least error [M, G] alone, FP32; see `round_to_least_error`."""
    if tile.rows != 1:
        raise AssertionError(f"groups are parts of a row, not {tile}")
    low, high = tile_range(weight_MK, tile)
    scale_MG, _ = scale_of_range(low, high, spec)
    scale_MG = half_scale(scale_MG) if half else scale_MG
    if weight_MK.numel() == 0:
        return scale_MG
    (_, cols), (_, groups) = tile.sizes((weight_MK.shape[0], weight_MK.shape[1])), scale_MG.shape
    x_MGC = F.pad(weight_MK.to(torch.float32), (0, groups * cols - weight_MK.shape[1])).unflatten(1, (groups, cols))
    reach_MG = torch.maximum(high, -low)
    search = _Search(x_MGC, reach_MG, spec, half, scale_MG)
    lowest = [float(-spec.lowest)] if -spec.lowest > spec.highest else []
    for code in (*lowest, *(share * spec.highest for share in SHARES)):
        for sign in (1.0, -1.0) if negative else (1.0,):
            search.try_with_fit(reach_MG / (sign * code), negative)
    return search.best_MG


class _Search:
    """The best scale so far of each group, by the error over the square of the group's largest magnitude."""

    def __init__(self, x_MGC: Tensor, reach_MG: Tensor, spec: IntSpec, half: bool, scale_MG: Tensor):
        self._x, self._spec, self._half = x_MGC, spec, half
        self._reach = torch.where(reach_MG > 0, reach_MG, 1.0)[:, :, None]
        self._unit = x_MGC / self._reach
        self.best_MG = scale_MG
        self._least = self._error(scale_MG, self._codes(scale_MG))

    def try_with_fit(self, scale_MG: Tensor, negative: bool) -> None:
        """Try a scale in the search for the least error: keep it, or the scale that fits its codes best, if its error
        is the least so far."""
        codes_MGC = self._try(scale_MG)
        fit_MG = (self._unit * codes_MGC).sum(2) / codes_MGC.square().sum(2) * self._reach[:, :, 0]
        self._try(fit_MG if negative else torch.where(fit_MG > 0, fit_MG, torch.nan))

    def _try(self, scale_MG: Tensor) -> Tensor:
        if self._half:  # the nearest; the range's was the next above where these steps are coarse
            scale_MG = scale_MG.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)
        scale_MG = torch.where(scale_MG == 0, torch.nan, scale_MG)
        codes_MGC = self._codes(scale_MG)
        error_MG = self._error(scale_MG, codes_MGC)
        better = error_MG < self._least  # never where a number is NaN
        self.best_MG = torch.where(better, scale_MG, self.best_MG)
        self._least = torch.where(better, error_MG, self._least)
        return codes_MGC

    def _codes(self, scale_MG: Tensor) -> Tensor:
        return (self._x / scale_MG[:, :, None]).round().clamp(self._spec.lowest, self._spec.highest)

    def _error(self, scale_MG: Tensor, codes_MGC: Tensor) -> Tensor:
        return (codes_MGC * (scale_MG[:, :, None] / self._reach) - self._unit).square().sum(2)

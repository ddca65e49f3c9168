"""How much a rounding lost: numbers that tell one scaling from another.

The mean relative error does not (it is 2 to 3 % for E4M3 under every scaling), so it is not among them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.formats.scaling import Tile, spread_scale, tile_amax
from tilewright.formats.tiled import TiledTensor


@dataclass(frozen=True)
class QuantizationError:
    """Error of a quantisation.

    Args:
        sqnr_db: signal to quantisation noise, 10 log10(sum x^2 / sum (x - q)^2); infinite where nothing was lost.
        underflow: share of the elements other than zero that became zero.
        saturation: share of the finite elements with the largest code that were clipped to it, not rounded.
        not_finite: share of elements that were infinite or NaN.
        dynamic_range_log2: largest over the tiles of log2(greatest / least magnitude above zero).
    """

    sqnr_db: float
    underflow: float
    saturation: float
    not_finite: float
    dynamic_range_log2: float


def sqnr_db(x: Tensor, rounded: Tensor) -> float:
    """The signal to noise of a quantisation in dB (SQNR) over the finite elements; infinite where they are equal."""
    finite = torch.isfinite(x)
    exact = torch.where(finite, x, 0.0).double()
    noise = (exact - torch.where(finite, rounded, 0.0).double()).square().sum()
    return float(10 * torch.log10(exact.square().sum() / noise)) if noise > 0 else float("inf")


def measure(x_MK: Tensor, tiled: TiledTensor) -> QuantizationError:
    """Measure quantisation error of `tiled` against `x_MK`.

    Example:
        >>> from tilewright.formats.quantize import quantize
        >>> from tilewright.formats.scaling import TENSORWISE
        >>> from tilewright.formats.spec import E4M3
        >>> from tilewright.formats.tiled import FP8_ROW, fp8_format
        >>> x = torch.ones(2, 128); x[0] *= 1e-6  # one small row: lost under one scale for all
        >>> measure(x, quantize(x, fp8_format(E4M3, TENSORWISE))).underflow, measure(x, quantize(x, FP8_ROW)).underflow
        (0.5, 0.0)
    """
    x = x_MK.float()
    rounded = tiled.dequantize()
    finite = torch.isfinite(x)
    alive = finite & (x != 0)
    largest = tiled.scale * tiled.spec.max * (1 + tiled.spec.eps / 4)  # half a step above the largest value
    clipped = finite & (x.abs() > spread_scale(largest, tiled.tile, tiled.shape)) & (rounded != 0)
    return QuantizationError(
        sqnr_db(x, rounded),
        _share(alive & (rounded == 0), alive),
        _share(clipped, finite),
        _share(~finite, torch.ones_like(finite)),
        _dynamic_range(x, tiled.tile),
    )


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum() / whole.sum().clamp(min=1))


def _dynamic_range(x_MK: Tensor, tile: Tile) -> float:
    """The dynamic range of the tile where it is largest: log2(greatest / least magnitude above zero); 0 without such
    elements."""
    if x_MK.numel() == 0:
        return 0.0
    greatest = tile_amax(x_MK, tile)
    magnitude = x_MK.abs()
    inverse = torch.where(torch.isfinite(magnitude) & (magnitude > 0), 1 / magnitude.clamp(min=2.0**-126), 0.0)
    ratio = greatest * tile_amax(inverse, tile)
    return float(torch.log2(ratio.clamp(min=1)).max())

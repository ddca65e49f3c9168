"""`FP8Quantizer`: values rounded to FP8 and back, with a gradient: bit for bit what the 8-bit matmuls of `linear` see.

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.formats.quantize import encode_with
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE, Tile, scale_inv_of, tile_amax
from tilewright.formats.spec import FP8_SPECS, FloatSpec
from tilewright.formats.tiled import TiledTensor
from tilewright.precision.quantizers.quantizer import FakeQuantizer, RoundedThrough, check_scale, check_static

Granularity = Literal["tensor", "token", "channel", "tile", "block"]
_TILES: dict[str, Tile] = {
    "tensor": TENSORWISE,
    "token": Tile(1, 0),
    "channel": Tile(1, 0),
    "tile": ROW_TILE,
    "block": BLOCK_TILE,
}
_FIXED = ("tensor", "channel", "block")
"""Granularities whose number of scales does not depend on the batch."""


class FP8Quantizer(FakeQuantizer):
    """Rounds to FP8 and back; the gradient passes straight through, and is zero where a value was clipped.

    A scale is found again for each input, unless `scale` fixes it or `calibrate_batches` inputs have found it.

    Args:
        scale: fixed decode scale, value = code * scale: a number, or a tensor of the granularity's scales ([M] for
            "channel"). Values beyond scale * 448 (E4M3) are clipped. None: from the largest magnitude.
        zero_point: 0. Other values are for integers.
        spec: "e4m3" or "e5m2".
        granularity: what shares a scale. "tensor"; "token" (the last dim) and "tile" (128 of the last dim) for
            activations; "channel" (all but the first dim) and "block" (128x128) for weights.
        power_of_two: scales that are found are powers of two; else FP32.
        calibrate_batches: so many first inputs each round with their own scale, and the largest magnitude of all of
            them fixes the scale of those that follow. 0: never fixed.
        clip_gradient: gradient zero where a value was clipped; False: one everywhere.

    Raises:
        ConfigError: a zero point, an unknown name, a scale that is no positive number, or a fixed scale where each
            input has scales of its own.

    Example: small and large values alike keep four binary digits. (Integers of the same scale would make 0.1 zero.)
        >>> FP8Quantizer()(torch.tensor([0.1, 3.0, -448.0])).tolist()
        [0.1015625, 3.0, -448.0]
        >>> from torch import nn
        >>> weight = nn.Linear(8, 4)  # quantisation-aware training of a layer
        >>> _ = nn.utils.parametrize.register_parametrization(weight, "weight", FP8Quantizer(granularity="channel"))
        >>> weight(torch.ones(2, 8)).sum().backward(); weight.parametrizations.weight.original.grad.unique()
        tensor([2.])
    """

    def __init__(
        self,
        scale: float | Tensor | None = None,
        zero_point: float = 0,
        *,
        spec: str = "e4m3",
        granularity: Granularity = "tensor",
        power_of_two: bool = True,
        calibrate_batches: int = 0,
        clip_gradient: bool = True,
    ):
        _check(scale, zero_point, spec, granularity, calibrate_batches)
        super().__init__(granularity, scale, calibrate_batches, clip_gradient)
        self.spec: FloatSpec = FP8_SPECS[spec]
        self.power_of_two = power_of_two
        self.register_buffer("scale", None if scale is None else torch.as_tensor(scale, dtype=torch.float32))

    @property
    def tile(self) -> Tile:
        """The tile of an FP8 quantiser: which elements of the input's matrix share a scale."""
        return _TILES[self.granularity]

    def _extremes(self, x_MK: Tensor) -> Tensor:
        return tile_amax(x_MK, self.tile)[None]

    def _scale_of(self, extremes: Tensor) -> Tensor:
        return scale_inv_of(extremes[0], self.spec, power_of_two=self.power_of_two)

    def _set_scale(self, extremes: Tensor) -> None:
        self.scale = self._scale_of(extremes)

    def _round(self, x_MK: Tensor, extremes: Tensor | None, clip: bool) -> Tensor:
        tile, spec, powers = self.tile, self.spec, self.power_of_two and extremes is not None
        scale = self._scale_of(extremes) if extremes is not None else self._fixed_grid(self.scale, x_MK)

        def rounding(x_MK, scale, _):
            qdata = encode_with(x_MK, scale, spec, tile, powers)
            return TiledTensor(qdata, scale, tile, spec).dequantize(x_MK.dtype)

        def limits(scale, _):
            return -scale * spec.max, scale * spec.max

        return RoundedThrough.apply(x_MK, scale, None, rounding, limits, tile, clip)[0]

    def extra_repr(self) -> str:
        """Describe an FP8 quantiser for print: its settings."""
        return f"{self.spec.name}, a scale a {self.granularity}, {self._source()}"


def _check(scale: Any, zero_point: Any, spec: str, granularity: str, calibrate_batches: int) -> None:
    if zero_point != 0:
        raise ConfigError(
            "FP8 has no zero point",
            got=f"zero_point = {zero_point}",
            need="0: the codes of E4M3 and E5M2 are floating-point numbers, as dense below zero as above and densest "
            "around it, so a shift would only move the dense part away from the small values",
            try_="zero_point = 0; a zero point belongs to integers (INT8)",
            where="zero_point",
        )
    for name, value, known in (("spec", spec, FP8_SPECS), ("granularity", granularity, _TILES)):
        if value not in known:
            raise ConfigError(
                f"Unknown {name}",
                got=repr(value),
                need=f"one of {', '.join(known)}",
                try_=f'{name} = "{next(iter(known))}"',
                where=name,
            )
    check_scale(scale)
    many = "a tensor of scales" if isinstance(scale, Tensor) and scale.numel() > 1 else ""
    check_static(granularity, _FIXED, f"calibrate_batches = {calibrate_batches}" if calibrate_batches else many)

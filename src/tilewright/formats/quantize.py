"""A matrix to tiles of codes: the definition that every kernel is held to, bit for bit.

Legend: M rows  K columns.
"""

import torch
from torch import Tensor

from tilewright.formats.encode import encode
from tilewright.formats.scaling import Tile, encode_scale_of, scale_values, spread_scale, tile_amax
from tilewright.formats.spec import FloatSpec
from tilewright.formats.tiled import OperandFormat, TiledTensor


def quantize(x_MK: Tensor, form: OperandFormat, noise: Tensor | None = None) -> TiledTensor:
    """Quantise a matrix: scale each tile by its own largest magnitude and round to the format.

    Args:
        x_MK: [M, K] FP32, BF16 or FP16; any size, also none.
        form: of the codes and scales.
        noise: int32 [M, K] for stochastic rounding, see `encode.encode`.

    Returns:
        Codes in x's memory order, and scales. An element that is infinite or NaN becomes NaN; the others of its tile
        are not harmed, but where codes have no NaN (E2M1): there the scale is NaN, and so is the tile.

    Example:
        >>> from tilewright.formats.tiled import FP8_ROW, NVFP4
        >>> x = torch.tensor([[3.0, 0.1, -0.02]])
        >>> tiled = quantize(x, FP8_ROW)
        >>> tiled.scale_inv.item(), tiled.dequantize().tolist()
        (0.0078125, [[3.0, 0.1015625, -0.01953125]])
        >>> quantize(x, NVFP4).dequantize().tolist()  # of sixteen codes
        [[3.0, 0.0, -0.0]]
    """
    element, tile = form.element, form.tile
    unsound = None if element.has_nan else tile_amax((~torch.isfinite(x_MK)).to(torch.float32), tile) > 0
    scale_inv, second = form.scale.scales(tile_amax(x_MK, tile), element, unsound)
    if scale_inv.dtype == torch.float32:
        qdata = encode_with(x_MK, scale_inv, element, tile, form.scale.rule != "exact", noise)
        return TiledTensor(qdata, scale_inv, tile, element)
    spread = spread_scale(scale_values(scale_inv, second), tile, (x_MK.shape[0], x_MK.shape[1]))
    return TiledTensor(encode(x_MK.to(torch.float32) / spread, element, noise), scale_inv, tile, element, second)


def encode_with(
    x_MK: Tensor, scale_inv: Tensor, spec: FloatSpec, tile: Tile, power_of_two: bool, noise: Tensor | None = None
) -> Tensor:
    """Quantise with given scales: codes of a matrix under FP32 ones: uint8 [M, K]."""
    scale = encode_scale_of(scale_inv, power_of_two=power_of_two)
    spread = spread_scale(scale, tile, (x_MK.shape[0], x_MK.shape[1]))
    return encode(x_MK.to(torch.float32) * spread, spec, noise)


def noise_like(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw random bits for stochastic rounding: int32 of x's shape."""
    info = torch.iinfo(torch.int32)
    return torch.randint(info.min, info.max, x.shape, dtype=torch.int32, device=x.device, generator=generator)

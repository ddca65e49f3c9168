"""A matrix to tiles of 8-bit codes: the definition that every kernel is held to, bit for bit.

Legend: M rows  K columns.
"""

import torch
from torch import Tensor

from tilewright.formats.encode import encode
from tilewright.formats.scaling import Tile, encode_scale_of, scale_inv_of, spread_scale, tile_amax
from tilewright.formats.spec import FloatSpec
from tilewright.formats.tiled import TiledTensor


def quantize(
    x_MK: Tensor, spec: FloatSpec, tile: Tile, *, power_of_two: bool = True, noise: Tensor | None = None
) -> TiledTensor:
    """Scale each tile by its own largest magnitude and round to the format.

    Args:
        x_MK: [M, K] FP32, BF16 or FP16; any size, also none.
        spec: E4M3 or E5M2.
        tile: which elements share a scale.
        power_of_two: scales are powers of two (exact in BF16), else amax / max in FP32.
        noise: int32 [M, K] for stochastic rounding, see `encode.encode`.

    Returns:
        Codes in x's memory order, and scales. An element that is infinite or NaN becomes NaN; the others of its tile
        are not harmed.

    Example:
        >>> from tilewright.formats.scaling import ROW_TILE
        >>> from tilewright.formats.spec import E4M3
        >>> x = torch.tensor([[3.0, 0.1, -0.02]])
        >>> tiled = quantize(x, E4M3, ROW_TILE)
        >>> tiled.scale_inv.item(), tiled.dequantize().tolist()
        (0.0078125, [[3.0, 0.1015625, -0.01953125]])
    """
    scale_inv = scale_inv_of(tile_amax(x_MK, tile), spec, power_of_two=power_of_two)
    return TiledTensor(encode_with(x_MK, scale_inv, spec, tile, power_of_two, noise), scale_inv, tile, spec)


def encode_with(
    x_MK: Tensor, scale_inv: Tensor, spec: FloatSpec, tile: Tile, power_of_two: bool, noise: Tensor | None = None
) -> Tensor:
    """Codes of a matrix under given scales: uint8 [M, K]."""
    scale = encode_scale_of(scale_inv, power_of_two=power_of_two)
    spread = spread_scale(scale, tile, (x_MK.shape[0], x_MK.shape[1]))
    return encode(x_MK.to(torch.float32) * spread, spec, noise)


def noise_like(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Random bits for stochastic rounding: int32 of x's shape."""
    info = torch.iinfo(torch.int32)
    return torch.randint(info.min, info.max, x.shape, dtype=torch.int32, device=x.device, generator=generator)

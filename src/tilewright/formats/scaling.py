"""Tiles of a matrix and the scale of each: from the largest magnitude to `scale_inv`.

`scale_inv` is the decode scale: value = code value * scale_inv. A power of two by default: then a code times its scale
is exact in BF16, so a BF16 matmul of the decoded operands multiplies the very numbers that an FP8 unit multiplies.

See: DeepSeek-V3 report, section 3.3.2 (1x128 tiles for activations, 128x128 blocks for weights).

Legend: M rows  K columns  T tile rows  U tile columns; grid [GM, GK] = tiles down and across.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.spec import FP32_MANTISSA_BITS, FloatSpec

_FP32_BIAS = 127
_FP32_INF_BITS = 0x7F800000


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a matrix that share a scale. 0 stands for all of them.

    Tiles at the right and lower edge may be smaller; a ragged matrix needs no padding.

    Example:
        >>> Tile(128, 128).grid((300, 576)), Tile(0, 0).grid((300, 576)), str(Tile(1, 128)), Tile(1, 128).transposed()
        ((3, 5), (1, 1), '1x128', Tile(rows=128, cols=1))
    """

    rows: int
    cols: int

    def __str__(self) -> str:
        return {(0, 0): "tensorwise", (1, 0): "rowwise", (0, 1): "columnwise"}.get(
            (self.rows, self.cols), f"{self.rows}x{self.cols}"
        )

    def transposed(self) -> "Tile":
        """The tile that has the same members in the transposed matrix."""
        return Tile(self.cols, self.rows)

    def sizes(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a full tile in a matrix of this shape, at least 1."""
        return self.rows or max(shape[0], 1), self.cols or max(shape[1], 1)

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Tiles down and across: the shape of the scales."""
        rows, cols = self.sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // cols)


ROW_TILE = Tile(1, 128)
"""Activations and gradients, along the dimension that a matmul sums over."""
COLUMN_TILE = Tile(128, 1)
"""The same for a matrix whose rows are summed over, as in a weight gradient."""
BLOCK_TILE = Tile(128, 128)
"""Weights: the same scales serve the matrix and its transpose."""
TENSORWISE = Tile(0, 0)


def tile_amax(x_MK: Tensor, tile: Tile) -> Tensor:
    """Largest finite magnitude of each tile, FP32 [GM, GK]; 0 where a tile has none.

    Infinities and NaN are left out, so that they do not spoil their neighbours' scale; `encode` marks them.
    """
    (rows, cols), (grid_rows, grid_cols) = tile.sizes(_shape(x_MK)), tile.grid(_shape(x_MK))
    if x_MK.numel() == 0:
        return x_MK.new_zeros((grid_rows, grid_cols), dtype=torch.float32)
    magnitude = x_MK.to(torch.float32).abs()
    magnitude = torch.where(magnitude < torch.inf, magnitude, 0.0)  # NaN compares false
    missing = (grid_rows * rows - x_MK.shape[0], grid_cols * cols - x_MK.shape[1])
    if any(missing):
        magnitude = F.pad(magnitude, (0, missing[1], 0, missing[0]))
    return magnitude.view(grid_rows, rows, grid_cols, cols).amax(dim=(1, 3))


def scale_inv_of(amax: Tensor, spec: FloatSpec, *, power_of_two: bool = True) -> Tensor:
    """The decode scale that brings `amax` to the top of the format without passing it.

    Power of two: the smallest 2^k with amax <= max * 2^k, by integer arithmetic on the bits. Else amax / max.
    k is kept where every scaled code is a normal BF16 number (E4M3: -117 to 119), so values beyond 448 * 2^119
    saturate and those below 2^-127 vanish. Zeros get the smallest scale.

    Args:
        amax: FP32, finite, not negative.
        spec: E4M3 or E5M2.
        power_of_two: round the scale up to one.

    Example:
        >>> from tilewright.formats.spec import E4M3
        >>> scale_inv_of(torch.tensor([448.0, 449.0, 3.0]), E4M3).tolist()
        [1.0, 2.0, 0.0078125]
    """
    least, most = exponent_range(spec)
    if not power_of_two:
        # By a tensor: on a GPU torch divides by a number through its inverse, which rounds twice.
        return amax.clamp(spec.max * 2.0**least, spec.max * 2.0**most) / torch.full_like(amax, spec.max)
    # A mantissa above that of the format's largest value carries into the exponent.
    above = (1 << FP32_MANTISSA_BITS) - 1 - _mantissa_of_max(spec)
    exponent = ((amax.view(torch.int32) + above) >> FP32_MANTISSA_BITS) - _FP32_BIAS - spec.max_exponent
    return power_of_two_of(exponent.clamp(least, most))


def exponent_range(spec: FloatSpec) -> tuple[int, int]:
    """Least and greatest k of a scale 2^k, such that smallest * 2^k is a normal BF16 and max * 2^k is finite."""
    smallest_exponent = 1 - spec.bias - spec.mantissa_bits
    return -126 - smallest_exponent, 127 - spec.max_exponent


def encode_scale_of(scale_inv: Tensor, *, power_of_two: bool = True) -> Tensor:
    """What values are multiplied by before encoding: 1 / scale_inv, exact for powers of two."""
    if not power_of_two:
        return 1.0 / scale_inv
    return ((2 * _FP32_BIAS << FP32_MANTISSA_BITS) - scale_inv.view(torch.int32)).view(torch.float32)


def power_of_two_of(exponent: Tensor) -> Tensor:
    """2^k in FP32 for int32 k from -126 to 127."""
    return ((exponent + _FP32_BIAS) << FP32_MANTISSA_BITS).view(torch.float32)


def spread_scale(scale: Tensor, tile: Tile, shape: tuple[int, int]) -> Tensor:
    """Scales [GM, GK] to one an element (views where they can be), [M, K]."""
    rows, cols = tile.sizes(shape)
    grid_rows, grid_cols = scale.shape
    if torch.compiler.is_compiling() and (shape[0] % rows or shape[1] % cols):
        return scale[_tile_of(shape[0], rows, scale)[:, None], _tile_of(shape[1], cols, scale)]
    wide = scale[:, None, :, None].expand(grid_rows, rows, grid_cols, cols)
    return wide.reshape(grid_rows * rows, grid_cols * cols)[: shape[0], : shape[1]]


def _tile_of(size: int, width: int, like: Tensor) -> Tensor:
    """Number of the tile that each of `size` rows or columns is in: int64 [size].

    For compiled code with ragged tiles, and by way of floating point: inductor for CPUs splits a loop whose index is
    divided by an integer, and forgets the ragged end (`try_loop_split` of torch 2.13). Codes there were never written.
    """
    return (torch.arange(size, device=like.device, dtype=torch.float64) / width).floor().to(torch.int64)


def _mantissa_of_max(spec: FloatSpec) -> int:
    return int((spec.max / 2.0**spec.max_exponent - 1) * 2**FP32_MANTISSA_BITS)


def _shape(x_MK: Tensor) -> tuple[int, int]:
    return x_MK.shape[0], x_MK.shape[1]

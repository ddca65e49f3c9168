"""A matrix in codes with a scale per tile: its format, and the one container that quantised operands travel in.

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.formats.encode import decode
from tilewright.formats.nibbles import pack_nibbles
from tilewright.formats.scaling import (
    BLOCK_TILE,
    MX_SCALE,
    NVFP4_SCALE,
    ROW_TILE,
    ScaleSpec,
    Tile,
    scale_values,
    spread_scale,
)
from tilewright.formats.spec import E2M1, E4M3, E5M2, FloatSpec


@dataclass(frozen=True)
class OperandFormat:
    """The target of a quantisation: the format of a matrix's elements, and their scales.

    Example:
        >>> str(FP8_ROW), str(MXFP8), str(NVFP4), MXFP8.bytes_of((4, 100))
        ('e4m3 1x128', 'e4m3 1x32 e8m0', 'e2m1 1x16 e4m3 + float32', 416)
    """

    element: FloatSpec
    scale: ScaleSpec

    @property
    def tile(self) -> Tile:
        """The tile of a tiled format: which elements share a scale."""
        return self.scale.tile

    def __str__(self) -> str:
        return f"{self.element.name} {self.scale}"

    def transposed(self) -> "OperandFormat":
        """The tiled format of the transposed matrix."""
        return OperandFormat(self.element, self.scale.transposed())

    @property
    def is_square(self) -> bool:
        """True if a tiled format is square: codes and scales of a matrix are those of its transpose too: quantised
        once, it is multiplied both ways."""
        return self.tile.rows == self.tile.cols

    @property
    def in_rows(self) -> bool:
        """True if a tiled format is in rows: no scale is shared by two rows, and along a row tiles have a width:
        matrices can be cut and joined."""
        return self.tile.rows == 1 and self.tile.cols > 0 and not self.scale.second

    def tensor(self, qdata: Tensor, scale_inv: Tensor, second: Tensor | None = None) -> "TiledTensor":
        """A tiled tensor of codes and scales in this format."""
        return TiledTensor(qdata, scale_inv, self.tile, self.element, second)

    @property
    def is_fp8(self) -> bool:
        """True if a tiled format is FP8: codes and scales as our kernels know them: E4M3 or E5M2, a scale per tile in
        FP32, not "floor"."""
        return self.element in (E4M3, E5M2) and self.scale.dtype == torch.float32 and self.scale.rule != "floor"

    def relaxed(self, *, power_of_two: bool) -> "OperandFormat":
        """This tiled format; unless `power_of_two`, with exact scales in place of powers of two; see
        `ScaleSpec.relaxed`."""
        return OperandFormat(self.element, self.scale.relaxed(power_of_two=power_of_two))

    def bytes_of(self, shape: tuple[int, int]) -> int:
        """Bytes in a tiled format: `TiledTensor.nbytes` of a matrix of this shape."""
        return shape[0] * shape[1] + self.scale_bytes(shape)

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        """Bytes of a tiled format's scales in a matrix of this shape."""
        down, across = self.tile.grid(shape)
        return down * across * self.scale.dtype.itemsize + 4 * self.scale.second


def fp8_format(element: FloatSpec, tile: Tile, *, power_of_two: bool = True) -> OperandFormat:
    """Make a tiled FP8 format: codes with an FP32 scale per tile, a power of two or not."""
    return OperandFormat(element, ScaleSpec(tile).relaxed(power_of_two=power_of_two))


FP8_ROW = fp8_format(E4M3, ROW_TILE)
FP8_BLOCK = fp8_format(E4M3, BLOCK_TILE)
MXFP8 = OperandFormat(E4M3, MX_SCALE)
MXFP4 = OperandFormat(E2M1, MX_SCALE)
NVFP4 = OperandFormat(E2M1, NVFP4_SCALE)
NVFP4_BLOCK = OperandFormat(E2M1, replace(NVFP4_SCALE, tile=Tile(16, 16)))
"""Of weights, as NVIDIA trains in NVFP4 (appendix B of the report in `scaling`): the same scales both ways."""


Parts = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Codes, scales and second scale of a TiledTensor, as operators of torch and autograd take them."""


@dataclass(frozen=True)
class TiledTensor:
    """Codes and scales of a matrix. Value of an element = decode(code) * scale_inv of its tile * second.

    Args:
        qdata: uint8 [M, K], one code each, any strides (a column-wise copy is stored transposed for the matrix unit's
            sake). `packed` gives what files and 4-bit units hold.
        scale_inv: [GM, GK], `tile.grid((M, K))`, in a dtype that `ScaleSpec` may have.
        tile: which elements share a scale.
        spec: format of the codes.
        second: scale of the whole matrix, FP32 [1, 1]; None: 1.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """

    qdata: Tensor
    scale_inv: Tensor
    tile: Tile
    spec: FloatSpec
    second: Tensor | None = None

    def __post_init__(self) -> None:
        if self.qdata.dtype != torch.uint8 or not self.scale_inv.dtype.is_floating_point:
            raise ValueError(f"codes are uint8 and scales floats, not {self.qdata.dtype} and {self.scale_inv.dtype}")
        if self.qdata.ndim != 2 or tuple(self.scale_inv.shape) != self.tile.grid(self.shape):
            raise ValueError(
                f"codes {list(self.qdata.shape)} in tiles of {self.tile} need scales "
                f"{list(self.tile.grid(self.shape))}, not {list(self.scale_inv.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a tiled tensor."""
        return self.qdata.shape[0], self.qdata.shape[1]

    @property
    def is_fp8(self) -> bool:
        """True if the elements of a tiled tensor are FP8: see `OperandFormat.is_fp8`."""
        return self.spec in (E4M3, E5M2) and self.scale_inv.dtype == torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of a tiled tensor's codes and scales as they are in memory."""
        return self.qdata.nbytes + self.scale_inv.nbytes + (0 if self.second is None else self.second.nbytes)

    def packed(self) -> Tensor:
        """The codes of a tiled tensor as stored: two per byte up to 4 bits, uint8 [M, ceil(K / 2)]
        (torch.float4_e2m1fn_x2's order)."""
        if self.spec.bits > 4:
            return self.qdata
        return pack_nibbles((self.qdata ^ 8).to(torch.int8) - 8)  # as signed numbers, which `nibbles` takes

    @property
    def scale(self) -> Tensor:
        """Decode scales of a tiled tensor in FP32 [GM, GK], the second one included."""
        return scale_values(self.scale_inv, self.second)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of a tiled tensor, [M, K]. Exact in FP32, and in BF16 where the scales are powers of two."""
        value = decode(self.qdata, self.spec) * spread_scale(self.scale, self.tile, self.shape)
        # torch 2.11 loses the gradient of a compiled autograd.Function that ends in a conversion to the dtype it has.
        return value if value.dtype == dtype else value.to(dtype)

    def rows(self, start: int, end: int) -> "TiledTensor":
        """Rows of a matrix in tiles of one row."""
        return replace(self, qdata=self.qdata[start:end], scale_inv=self.scale_inv[start:end])

    def columns(self, start: int, end: int) -> "TiledTensor":
        """Columns of a matrix in tiles along a row, from the beginning of one."""
        cols = self.tile.cols
        scale_inv = self.scale_inv[:, start // cols : -(-end // cols)]
        return replace(self, qdata=self.qdata[:, start:end], scale_inv=scale_inv)

    def transposed(self) -> "TiledTensor":
        """The transposed tiled tensor: the same codes and scales seen the other way, nothing copied or rounded."""
        return TiledTensor(self.qdata.T, self.scale_inv.T, self.tile.transposed(), self.spec, self.second)


class WithCopies(NamedTuple):
    """A matrix or batch of them [..., K] and its 8-bit copies, handed to the only layers that read it.

    `row` is the value as [N, K] in tiles of 1x128; `column` is that transposed, [K, N], in tiles of 1x128 tokens. With
    `arrive` the value is a place without numbers, and `column` is of this rank's tokens alone.
    """

    value: Tensor
    row: TiledTensor
    column: TiledTensor
    arrive: Callable[[Parts], Parts] | None = None
    """Makes of codes and scales of `column` those of all tokens, as backward reads them."""

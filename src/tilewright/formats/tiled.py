"""A matrix in 8-bit codes with a scale per tile: the one container that quantised operands travel in.

Legend: M rows  K columns; grid [GM, GK] = tiles down and across.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.formats.encode import decode
from tilewright.formats.scaling import Tile, spread_scale
from tilewright.formats.spec import FloatSpec


@dataclass(frozen=True)
class TiledTensor:
    """Codes and scales of a matrix. Value of an element = decode(code) * scale_inv of its tile.

    Args:
        codes: uint8 [M, K], any strides (a column-wise copy is stored transposed for the matrix unit's sake).
        scale_inv: FP32 [GM, GK], `tile.grid((M, K))`.
        tile: which elements share a scale.
        spec: E4M3 or E5M2.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """

    qdata: Tensor
    scale_inv: Tensor
    tile: Tile
    spec: FloatSpec

    def __post_init__(self) -> None:
        if self.qdata.dtype != torch.uint8 or self.scale_inv.dtype != torch.float32:
            raise ValueError(f"codes are uint8 and scales FP32, not {self.qdata.dtype} and {self.scale_inv.dtype}")
        if self.qdata.ndim != 2 or tuple(self.scale_inv.shape) != self.tile.grid(self.shape):
            raise ValueError(
                f"codes {list(self.qdata.shape)} in tiles of {self.tile} need scales "
                f"{list(self.tile.grid(self.shape))}, not {list(self.scale_inv.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.qdata.shape[0], self.qdata.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.qdata.nbytes + self.scale_inv.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, [M, K]. Exact in FP32, and in BF16 where the scales are powers of two."""
        value = decode(self.qdata, self.spec) * spread_scale(self.scale_inv, self.tile, self.shape)
        # torch 2.11 loses the gradient of a compiled autograd.Function that ends in a conversion to the dtype it has.
        return value if value.dtype == dtype else value.to(dtype)

    def transposed(self) -> "TiledTensor":
        """The transposed matrix: the same codes and scales seen the other way, nothing copied or rounded."""
        return TiledTensor(self.qdata.T, self.scale_inv.T, self.tile.transposed(), self.spec)


class WithCopies(NamedTuple):
    """A matrix or batch of them [..., K] and its 8-bit copies, handed to the only layers that read it.

    `row` is the value as [N, K] in tiles of 1x128; `column` is that transposed, [K, N], in tiles of 1x128 tokens.
    """

    value: Tensor
    row: TiledTensor
    column: TiledTensor

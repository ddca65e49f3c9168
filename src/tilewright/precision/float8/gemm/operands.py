"""The 8-bit operands of a linear layer's matmuls: which tiles, which spec, which copies.

Shared by the layers that make them ahead (`linear`, `experts`, `frozen_linear`) and by the matmuls that make what is
missing (`gemm_ops`).

Legend: N tokens  K input features  M output features.
"""

from torch import Tensor

from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2, FloatSpec
from tilewright.formats.tiled import TiledTensor, fp8_format
from tilewright.ops.kernels import Kernels


def weight_tile(tensorwise: bool) -> Tile:
    """Which elements of a weight share a scale."""
    return TENSORWISE if tensorwise else BLOCK_TILE


def input_tile(tensorwise: bool) -> Tile:
    """Which elements of an input or gradient, or of its transposed copy, share a scale."""
    return TENSORWISE if tensorwise else ROW_TILE


def gradient_spec(name: str) -> FloatSpec:
    """Format of the output gradient in a matmul of 8-bit operands."""
    return E4M3 if name == "fp8_tile" else E5M2


def quantize_weight(weight_MK: Tensor, kernels: Kernels, *, tensorwise: bool, power_of_two: bool) -> TiledTensor:
    """The weight in E4M3, in blocks of 128x128 or under one scale."""
    return kernels.quantize(weight_MK, fp8_format(E4M3, weight_tile(tensorwise), power_of_two=power_of_two))


def quantize_copies(
    x_NK: Tensor,
    spec: FloatSpec,
    kernels: Kernels,
    *,
    tensorwise: bool,
    power_of_two: bool,
    row: bool,
    column: bool,
) -> tuple[TiledTensor | None, TiledTensor | None]:
    """The row-wise copy [N, K] and the transposed column-wise copy [K, N] of an input or gradient, as asked for."""
    form = fp8_format(spec, input_tile(tensorwise), power_of_two=power_of_two)
    if tensorwise:
        whole = kernels.quantize(x_NK, form) if row or column else None
        return whole if row else None, whole.transposed() if whole is not None and column else None
    if column:
        both = kernels.quantize_both(x_NK, form)
        return both[0] if row else None, both[1]
    return kernels.quantize(x_NK, form) if row else None, None

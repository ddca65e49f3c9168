"""Which copies of an input or gradient a linear layer's matmuls have, in the formats of its `Operands`.

Shared by the layers that make them ahead (`linear`, `experts`, `frozen_linear`) and by the matmuls that make what is
missing (`gemm_ops`).

Legend: N tokens  K input features  M output features.
"""

import torch
from torch import Tensor

from tilewright.formats.scaling import TENSORWISE
from tilewright.formats.tiled import OperandFormat, Parts, TiledTensor
from tilewright.ops.base.weight_gradient_queue import Waiting
from tilewright.ops.kernels import Kernels


def parts_of(tiled: TiledTensor | None) -> Parts:
    """Take a GEMM's operand apart: the tensors of a TiledTensor; three times None for none."""
    return (None, None, None) if tiled is None else (tiled.qdata, tiled.scale_inv, tiled.second)


def of_parts(form: OperandFormat, parts: Parts) -> TiledTensor | None:
    """A GEMM's operand of its parts, that `parts_of` took apart."""
    qdata, scale_inv, second = parts
    return None if qdata is None or scale_inv is None else form.tensor(qdata, scale_inv, second)


def quantize_copies(
    x_NK: Tensor, form: OperandFormat, kernels: Kernels, *, row: bool, column: bool
) -> tuple[TiledTensor | None, TiledTensor | None]:
    """Quantise copies as operands: the row-wise one [N, K] and the transposed column-wise one [K, N] of an input or
    gradient, as asked for."""
    if form.tile == TENSORWISE:  # one copy is both
        whole = kernels.quantize(x_NK, form) if row or column else None
        return whole if row else None, whole.transposed() if whole is not None and column else None
    if column:
        both = kernels.quantize_both(x_NK, form)
        return both[0] if row else None, both[1]
    return kernels.quantize(x_NK, form) if row else None, None


def tile_wgrad(kernels: Kernels, dy_MN: TiledTensor, x_KN: TiledTensor, dtype: torch.dtype) -> Waiting:
    """A weight's gradient [M, K] from operands: column-wise copies of the output's gradient and of the input, now or
    later."""
    held = [part for part in (*parts_of(dy_MN), *parts_of(x_KN)) if part is not None]
    return Waiting(lambda: kernels.tile_gemm(dy_MN, x_KN, out_dtype=dtype), held)

"""The law for quantised operands, in plain torch: `formats` decides the bits, FP32 matmuls and sums.

Legend: M, N rows  K columns  D features.
"""

import torch
from torch import Tensor

from tilewright.formats import quantize as formats
from tilewright.formats.tiled import OperandFormat, TiledTensor
from tilewright.ops.backends.ref import math

Both = tuple[TiledTensor, TiledTensor]
WithCopies = tuple[Tensor, TiledTensor, TiledTensor]


def quantize(x_MK: Tensor, form: OperandFormat, noise: Tensor | None = None) -> TiledTensor:
    """See `ops.quantize`."""
    return formats.quantize(x_MK, form, noise)


def quantize_both(x_MK: Tensor, form: OperandFormat) -> Both:
    """See `ops.quantize`."""
    return formats.quantize(x_MK, form), formats.quantize(x_MK.T, form)


def tile_gemm(a: TiledTensor, b: TiledTensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See `ops.gemm`. FP32 operands: on a GPU, their matmul must not be allowed to use TF32."""
    out_MN = a.dequantize() @ b.dequantize().T
    if bias_N is not None:
        out_MN = out_MN + bias_N.to(out_dtype).to(torch.float32)
    return out_MN.to(out_dtype)


def rms_norm_quantize(x: Tensor, weight_D: Tensor, eps: float, form: OperandFormat) -> WithCopies:
    """See `ops.quantize`."""
    y = math.rms_norm(x, weight_D, eps)
    return y, *quantize_both(y.reshape(-1, y.shape[-1]), form)


def swiglu_quantize(gate: Tensor, up: Tensor, form: OperandFormat) -> WithCopies:
    """See `ops.quantize`."""
    y = math.swiglu(gate, up)
    return y, *quantize_both(y.reshape(-1, y.shape[-1]), form)

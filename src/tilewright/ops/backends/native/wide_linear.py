"""A 16-bit linear layer multiplied in FP32; see `wide`. Kept for backward are x and the weight in 16 bits.

The weight's gradient stays in FP32 where the weight is: it is summed in FP32 here, and rounding would cost time.

Legend: M out features or rows  N rows  K columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """See `ops.linear`."""
    return _WideLinear.apply(x, weight_MK, bias_M)


@torch.library.custom_op("tilewright::wide_gemm", mutates_args=())
def _gemm(a: Tensor, b_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    bias = None if bias_N is None else bias_N.float()
    return F.linear(a.float(), b_NK.float(), bias).to(dtype)


@_gemm.register_fake
def _(a, b_NK, bias_N, dtype):
    return a.new_empty((*a.shape[:-1], b_NK.shape[0]), dtype=dtype)


class _WideLinear(torch.autograd.Function):
    """One operator per GEMM, so that recomputation and the compiler keep its 16-bit result, never the FP32 one."""

    @staticmethod
    def forward(ctx, x, weight_MK, bias_M):
        narrow_MK = weight_MK.to(x.dtype)
        ctx.save_for_backward(x, narrow_MK)
        ctx.weight_dtype, ctx.bias_dtype = weight_MK.dtype, None if bias_M is None else bias_M.dtype
        return _gemm(x, narrow_MK, None if bias_M is None else bias_M.to(x.dtype), x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, narrow_MK = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad
        dy_NM = dy.flatten(0, -2)
        dx = _gemm(dy, narrow_MK.T, None, dy.dtype) if wants_dx else None
        dw = _gemm(dy_NM.T, x.flatten(0, -2).T, None, ctx.weight_dtype) if wants_dw else None
        db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if wants_db else None
        return dx, dw, db

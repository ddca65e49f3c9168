"""A 16-bit linear layer multiplied in FP32; see `wide`. Kept for backward are x and the weight in 16 bits.

Legend: M out features or rows  N rows  K columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """See `ops.linear`."""
    bias = None if bias_M is None else bias_M.to(x.dtype)
    return _WideLinear.apply(x, weight_MK.to(x.dtype), bias)


@torch.library.custom_op("tilewright::wide_gemm", mutates_args=())
def _gemm(a: Tensor, b_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    bias = None if bias_N is None else bias_N.float()
    return F.linear(a.float(), b_NK.float(), bias).to(a.dtype)


@_gemm.register_fake
def _(a, b_NK, bias_N):
    return a.new_empty((*a.shape[:-1], b_NK.shape[0]))


class _WideLinear(torch.autograd.Function):
    """One operator a product, so that recomputation and the compiler keep its 16-bit result, never the FP32 one."""

    @staticmethod
    def forward(ctx, x, weight_MK, bias_M):
        ctx.save_for_backward(x, weight_MK)
        return _gemm(x, weight_MK, bias_M)

    @staticmethod
    def backward(ctx, dy):
        x, weight_MK = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad
        dy_NM = dy.flatten(0, -2)
        dx = _gemm(dy, weight_MK.T, None) if wants_dx else None
        dw = _gemm(dy_NM.T, x.flatten(0, -2).T, None) if wants_dw else None
        db = dy_NM.sum(0, dtype=torch.float32).to(dy.dtype) if wants_db else None
        return dx, dw, db

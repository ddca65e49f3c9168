"""Products of 16-bit operands multiplied in FP32, for CPUs that have no 16-bit matrix instructions.

torch's own 16-bit product on such a CPU (oneDNN's emulation) ran at a quarter of the speed of its FP32 product
(docs/log.md, 2026-11-21). Products of 16-bit numbers are exact in FP32, so only the order of the sums differs.
Kept for backward is what the ordinary layer keeps: x and the weight in 16 bits. Loss and attention ask `widens`.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.core.hardware import Machine, cpu_features, cpu_multiplies
from tilewright.ops.dispatch import Case


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of this candidate."""
    if case.device_type != "cpu" or case.dtype not in (torch.bfloat16, torch.float16):
        return "it is for 16-bit operands on CPUs"
    return "the CPU multiplies this format itself" if machine.cpu_multiplies(case.dtype) else None


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """See `ops.linear`."""
    bias = None if bias_M is None else bias_M.to(x.dtype)
    return _WideLinear.apply(x, weight_MK.to(x.dtype), bias)


@torch.compiler.assume_constant_result
def widens(device_type: str, dtype: torch.dtype) -> bool:
    """Whether products of this dtype are faster in FP32 on this device: a CPU without instructions for them."""
    return device_type == "cpu" and not _multiplies(dtype)


@functools.cache
def _multiplies(dtype: torch.dtype) -> bool:
    return cpu_multiplies(dtype, cpu_features())


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b with FP32 operands, rounded to a's dtype: into `out`, where given."""
    product = a.float() @ b.float()
    return product.to(a.dtype) if out is None else out.copy_(product)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_MK, bias_M):
        ctx.save_for_backward(x, weight_MK)
        bias = None if bias_M is None else bias_M.float()
        return F.linear(x.float(), weight_MK.float(), bias).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight_MK = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad
        dy_NM = dy.float().flatten(0, -2)
        dx = (dy.float() @ weight_MK.float()).to(x.dtype) if wants_dx else None
        dw = (dy_NM.T @ x.float().flatten(0, -2)).to(weight_MK.dtype) if wants_dw else None
        db = dy_NM.sum(0).to(dy.dtype) if wants_db else None
        return dx, dw, db

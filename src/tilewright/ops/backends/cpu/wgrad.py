"""Weight gradients of BF16 layers on AMX tiles by a library in C++: summed and returned in FP32, never rounded to BF16.

torch's own matmul (oneDNN) takes the gradient of the output as a transposed left operand, at half the speed of the
forward matmul, and rounds its result. `linear` is torch's forward and input gradient with this for the weight.

Legend: N tokens  M out features  K in features.
"""

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from tilewright.core.hardware import Machine, detect_machine
from tilewright.ops.backends.cpu import amx
from tilewright.ops.backends.cpu.addresses import address
from tilewright.ops.backends.cpu.build import WGRAD
from tilewright.ops.base.deferred_linear import LinearGemms
from tilewright.ops.base.dispatch import Case


def why_not(machine: Machine, case: Case) -> str | None:
    """The `why_not` of a linear layer with weight gradients (wgrad) in C++. Builds the library where it is not there
    yet (seconds)."""
    return amx.why_not(WGRAD, machine, case)


def runs(device_type: str, dtype: torch.dtype) -> bool:
    """True if the wgrad kernel takes these operands on this machine."""
    return device_type == "cpu" and dtype == torch.bfloat16 and _runs_here()


@functools.cache
def _runs_here() -> bool:
    return why_not(detect_machine("cpu"), Case("cpu", torch.bfloat16)) is None


@torch.library.custom_op("tilewright::weight_gradient", mutates_args=())
def weight_gradient(dy_NM: Tensor, x_NK: Tensor) -> Tensor:
    """Compute a weight gradient in C++: dy^T x of BF16 operands, any strides, in FP32: [M, K]."""
    out_MK = dy_NM.new_empty((dy_NM.shape[1], x_NK.shape[1]), dtype=torch.float32)
    add_weight_gradient_(out_MK, dy_NM, x_NK, adds=False)
    return out_MK


@weight_gradient.register_fake
def _(dy_NM, x_NK):
    return dy_NM.new_empty((dy_NM.shape[1], x_NK.shape[1]), dtype=torch.float32)


def add_weight_gradient_(out_MK: Tensor, dy_NM: Tensor, x_NK: Tensor, *, adds: bool = True) -> None:
    """Add a weight gradient (wgrad) in C++: out += dy^T x, in place; without `adds` what `out` held is not read.

    Args:
        out_MK: FP32, contiguous.
        dy_NM: BF16, any strides.
        x_NK: BF16, any strides.
        adds: to what `out` holds.

    Raises:
        TypeError: other dtypes, or an `out` that is not contiguous.
        MemoryError: no memory to pack the operands.
    """
    if (dy_NM.dtype, x_NK.dtype, out_MK.dtype) != (torch.bfloat16, torch.bfloat16, torch.float32):
        raise TypeError(f"BF16 operands and an FP32 result are needed: {dy_NM.dtype}, {x_NK.dtype}, {out_MK.dtype}")
    if not out_MK.is_contiguous():
        raise TypeError("the result must be contiguous")
    if isinstance(out_MK, FakeTensor):  # of a model that is only traced: there are no bytes to add to
        return
    dy_NM, x_NK = (operand if operand.stride(1) == 1 else operand.contiguous() for operand in (dy_NM, x_NK))
    no_memory = amx.functions(WGRAD).tw_weight_gradient(
        address(dy_NM), dy_NM.stride(0), address(x_NK), x_NK.stride(0), address(out_MK),
        dy_NM.shape[0], *out_MK.shape, adds, torch.get_num_threads(),
    )  # fmt: skip
    if no_memory:
        raise MemoryError("no memory to pack the operands of a weight gradient (2 MiB)")


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Run a linear layer whose weight gradient (wgrad) is in C++: see `ops.linear`."""
    return _Linear.apply(x, weight_MK, None if bias_M is None else bias_M.to(x.dtype))


class _Linear(torch.autograd.Function):
    """The cast of the weight is inside, so that its gradient reaches an FP32 weight in FP32."""

    @staticmethod
    def forward(ctx, x, weight_MK, bias_M):
        low_MK = weight_MK.to(x.dtype)
        ctx.save_for_backward(x, low_MK)
        ctx.weight_dtype = weight_MK.dtype
        return F.linear(x, low_MK, bias_M)

    @staticmethod
    def backward(ctx, dy):
        x, low_MK = ctx.saved_tensors
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad
        dy_NM = dy.reshape(-1, dy.shape[-1])
        dx = torch.matmul(dy, low_MK) if wants_dx else None  # [..., K]
        dw = weight_gradient(dy_NM, x.reshape(-1, x.shape[-1])).to(ctx.weight_dtype) if wants_dw else None
        db = dy_NM.sum(0, dtype=torch.float32).to(dy.dtype) if wants_db else None
        return dx, dw, db


LINEAR_GEMMS = LinearGemms(
    F.linear,
    dgrad=torch.matmul,
    wgrad=lambda dy_NM, x_NK, dtype: weight_gradient(dy_NM, x_NK).to(dtype),
    bgrad=lambda dy_NM, dtype: dy_NM.sum(0, dtype=torch.float32).to(dy_NM.dtype).to(dtype),
)
"""The matmuls of `linear`, one by one."""

"""A norm or an activation that hands 8-bit copies of its result to the layers that read it.

The value is written once and quantised in the same pass (one kernel on a GPU), instead of being read again by each
layer. `convert` sets these on modules that name their only readers (`quantized_readers`).

Legend: N tokens  D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.formats.tiled import OperandFormat, TiledTensor, WithCopies
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.kernels import Kernels


@dataclass(frozen=True)
class QuantizingNorm:
    """RMSNorm whose result goes to its readers with 8-bit copies."""

    kernels: Kernels
    form: OperandFormat

    def __call__(self, x: Tensor, weight_D: Tensor, eps: float) -> WithCopies | Tensor:
        """A fused norm of x [..., D], in x's dtype; without copies inside of a torch.func transform."""
        if in_func_transform():
            return self.kernels.rms_norm(x, weight_D, eps)
        return _with_copies(self.form, *_NormQuantize.apply(x, weight_D, eps, self.kernels, self.form))


@dataclass(frozen=True)
class QuantizingSwiGLU:
    """silu(gate) * up, which goes to its reader with 8-bit copies."""

    kernels: Kernels
    form: OperandFormat

    def __call__(self, gate: Tensor, up: Tensor) -> WithCopies | Tensor:
        """Run a fused SwiGLU: gate and up [..., D] -> [..., D], in gate's dtype; without copies inside of a torch.func
        transform."""
        if in_func_transform():
            return self.kernels.swiglu(gate, up)
        return _with_copies(self.form, *_SwigluQuantize.apply(gate, up, self.kernels, self.form))


def _with_copies(form: OperandFormat, y: Tensor, *copies: Any) -> WithCopies:
    """A fused result with both copies of the parts that `_parts` has taken them into."""
    row, column = (TiledTensor(copies[at], copies[at + 1], form.tile, form.element, copies[at + 2]) for at in (0, 3))
    return WithCopies(y, row, column)


def _parts(row: TiledTensor, column: TiledTensor) -> tuple[Tensor | None, ...]:
    return row.qdata, row.scale_inv, row.second, column.qdata, column.scale_inv, column.second


class _NormQuantize(torch.autograd.Function):
    """(y, codes and scales of both copies); the gradient is that of RMSNorm, in FP32."""

    @staticmethod
    def forward(ctx, x, weight_D, eps, kernels, form):
        y, row, column = kernels.rms_norm_quantize(x, weight_D, eps, form)
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        copies = _parts(row, column)
        ctx.mark_non_differentiable(*(part for part in copies if part is not None))
        return y, *copies

    @staticmethod
    def backward(ctx, dy, *_):
        x, weight_D = ctx.saved_tensors
        wide = x.to(torch.float32)
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed, dy = wide * rstd, dy.to(torch.float32)
        dnormed = dy * weight_D.to(torch.float32)
        dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd
        dweight_D = (dy * normed).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dweight_D.to(weight_D.dtype), None, None, None


class _SwigluQuantize(torch.autograd.Function):
    """(y, codes and scales of both copies); the gradient is that of SwiGLU, in FP32."""

    @staticmethod
    def forward(ctx, gate, up, kernels, form):
        y, row, column = kernels.swiglu_quantize(gate, up, form)
        ctx.save_for_backward(gate, up)
        copies = _parts(row, column)
        ctx.mark_non_differentiable(*(part for part in copies if part is not None))
        return y, *copies

    @staticmethod
    def backward(ctx, dy, *_):
        gate, up = ctx.saved_tensors
        wide, dy = gate.to(torch.float32), dy.to(torch.float32)
        sigmoid = torch.sigmoid(wide)
        dgate = dy * up.to(torch.float32) * sigmoid * (1 + wide * (1 - sigmoid))
        return dgate.to(gate.dtype), (dy * wide * sigmoid).to(up.dtype), None, None

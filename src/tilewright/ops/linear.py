"""linear: out_NM = x_NK @ weight_MK.T + bias_M.

Computes in x's dtype (weight and bias are cast to it) with FP32 accumulation; returns x's dtype. Gradients have the
dtypes of what they are gradients of; on the way the weight's is rounded
to x's dtype by `native`, as torch has no other GEMM; `amx` and `wide` do not round it.

row_linear: the same of at most `MOST_ROWS` rows, with operands of one dtype, without autograd. It is what a pass of
cached tokens multiplies, one row per sequence, so its time is that of reading the weight. torch's GEMMs read BF16
weights at half of the memory's speed, and FP32 ones from two rows on (docs/log.md, 2026-11-27). In `cpu` a row has the
same bits beside any others.

cached_layer(x_ND, weights, eps, cos_NR, sin_NR, pasts): one layer of a dense decoder with grouped-query attention, for
the next token of at most `MOST_ROWS` rows: x + attention(norm(x)), then x + mlp(norm(x)), or one of both where a layer
has no more, all in the weights' dtype, without autograd. `weights` and `pasts` are `LayerWeights` and a `RowPast` for
each row, whose last position is written (none without attention); cos and sin [N or 1, d/2] FP32. Rounds to the dtype
where calls of their own would; returns [N, D]. In a small layer one call takes a third of their time (docs/log.md,
2026-11-27).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.core.hardware import Machine
from tilewright.ops.backends.cpu import cached_layer, row_linear
from tilewright.ops.backends.native import wide
from tilewright.ops.backends.ref import cached_layer as ref_layer
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.deferred_linear import LinearGemms, deferred_linear
from tilewright.ops.base.dispatch import Candidate, Case, Op, always
from tilewright.ops.base.transforms import in_func_transform
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue


def native(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Run a linear layer by torch's own GEMM: oneDNN on CPU (AMX tiles for BF16 where the processor has them), cuBLAS
    on CUDA."""
    return F.linear(x, weight_MK.to(x.dtype), None if bias_M is None else bias_M.to(x.dtype))


def _wide(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    from tilewright.ops.backends.native import wide_ops  # it registers torch operators

    return wide_ops.linear(x, weight_MK, bias_M)


def machines_linear(
    x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None, queue: WeightGradientQueue | None = None
) -> Tensor:
    """A linear layer for callers without `Kernels`: `native`, or `wide` where this machine's CPU does not multiply x's
    dtype."""
    if in_func_transform():
        return _in_transforms(x, weight_MK, bias_M)
    widens = wide.widens(x.device.type, x.dtype)
    if queue is not None:
        return deferred_linear(gemms_of("wide" if widens else "native"), x, weight_MK, bias_M, queue)
    return (_wide if widens else native)(x, weight_MK, bias_M)


def _amx(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    from tilewright.ops.backends.cpu import wgrad  # it registers a torch operator

    return wgrad.linear(x, weight_MK, bias_M)


def _why_not_amx(machine: Machine, case: Case) -> str | None:
    from tilewright.ops.backends.cpu import wgrad  # it registers a torch operator

    return wgrad.why_not(machine, case)


def _in_transforms(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    return (ref.linear if wide.widens(x.device.type, x.dtype) else native)(x, weight_MK, bias_M)


def gemms_of(candidate: str) -> LinearGemms:
    """The GEMMs of the linear operation one by one, as a candidate computes them, for weight gradients that wait
    (`base.weight_gradient_queue`)."""
    if candidate == "wide":
        from tilewright.ops.backends.native import wide_ops  # it registers torch operators

        return wide_ops.LINEAR_GEMMS
    if candidate == "amx":
        from tilewright.ops.backends.cpu import wgrad  # it registers a torch operator

        return wgrad.LINEAR_GEMMS
    return _GEMMS[candidate]


_GEMMS = {
    "native": LinearGemms(
        F.linear,
        dgrad=torch.matmul,
        wgrad=lambda dy_NM, x_NK, dtype: (dy_NM.T @ x_NK).to(dtype),  # [M, K]
        bgrad=lambda dy_NM, dtype: dy_NM.sum(0).to(dtype),
    ),
    "ref": LinearGemms(
        ref.linear,
        dgrad=lambda dy, weight_MK: ref.linear(dy, weight_MK.T),
        wgrad=lambda dy_NM, x_NK, dtype: ref.linear(dy_NM.T, x_NK.T).to(dtype),
        bgrad=lambda dy_NM, dtype: dy_NM.to(ref.wide(dy_NM.dtype)).sum(0).to(dy_NM.dtype).to(dtype),
    ),
}


LINEAR = Op(
    "linear",
    (
        Candidate("amx", _amx, _why_not_amx),
        Candidate("wide", _wide, wide.why_not),
        Candidate("native", native, always),
        Candidate("ref", ref.linear, always),
    ),
    in_transforms=_in_transforms,
)
MOST_ROWS = row_linear.MOST_ROWS
"""Of `row_linear`. From more rows on torch's GEMMs are as fast."""
ROW_LINEAR = Op(
    "row_linear",
    (
        Candidate("cpu", row_linear.row_linear, row_linear.why_not),
        Candidate("native", F.linear, always),
        Candidate("ref", ref.linear, always),
    ),
)
CACHED_LAYER = Op(
    "cached_layer",
    (
        Candidate("cpu", cached_layer.cached_layer, cached_layer.why_not),
        Candidate("ref", ref_layer.cached_layer, always),
    ),
    instead="none (its parts run)",
)

"""linear: out_NM = x_NK @ weight_MK.T + bias_M.

Computes in x's dtype (weight and bias are cast to it) with FP32 accumulation; returns x's dtype.
"""

from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.dispatch import Candidate, Op, always
from tilewright.ops.native import wide
from tilewright.ops.ref import math as ref


def native(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """torch's own GEMM: oneDNN on CPU (AMX tiles for BF16 where the processor has them), cuBLAS on CUDA."""
    return F.linear(x, weight_MK.to(x.dtype), None if bias_M is None else bias_M.to(x.dtype))


def _wide(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    from tilewright.ops.native import wide_linear  # it registers a torch operator

    return wide_linear.linear(x, weight_MK, bias_M)


LINEAR = Op(
    "linear",
    (
        Candidate("wide", _wide, wide.why_not),
        Candidate("native", native, always),
        Candidate("ref", ref.linear, always),
    ),
)

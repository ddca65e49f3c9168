"""attention: softmax(q k^T * scale) v, causal, never across documents.

q [B, H, S, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv] with H a multiple of Hkv (grouped-query) and Dv <= Dk;
segments [B, S] integers or None: a position sees earlier positions of its own segment only.
scale defaults to Dk^-0.5. Softmax in FP32. Returns [B, H, S, Dv] in q's dtype.
block: query rows at a time, so that neither scores nor mask are S x S; 0 lets torch's kernels decide. The reference
holds all. Changes memory and time, not the result.
"""

from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.native import attention as native
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.dispatch import Candidate, Case, Op, always


def _amx(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None = None, scale: float | None = None, block: int = 0):
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    return attention.attention(q, k, v, segments, scale, block)


def _why_not_amx(machine: Machine, case: Case) -> str | None:
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    return attention.why_not(machine, case)


ATTENTION = Op(
    "attention",
    (
        Candidate("amx", _amx, _why_not_amx),
        Candidate("native", native.attention, always),
        Candidate("ref", ref.attention, always),
    ),
)

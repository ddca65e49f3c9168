"""attention: softmax(q k^T * scale) v, causal, never across documents.

q [B, H, S, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv] with H a multiple of Hkv (grouped-query) and Dv <= Dk;
segments [B, S] integers or None: a position sees earlier positions of its own segment only. Equal values stand together
in a row (`ops.base.documents`); candidates that `reads_documents` names take `Documents` too, found once for layers.
scale defaults to Dk^-0.5. Softmax in FP32. Returns [B, H, S, Dv] in q's dtype.
block: query rows at a time, so that neither scores nor mask are S x S; 0 lets torch's kernels decide. The reference
holds all. Changes memory and time, not the result.
window: keys that a position sees at most, the last ones, its own included; 0: all.

linear_attention: the past is a matrix per head, by the gated delta rule.

q, k, v [B, H, S, D], decay and rate [B, H, S], all as projections make them. Queries and keys go through SiLU and have
length 1 then, values go through SiLU. The state M [D, D] of a head is 0 where a document begins; for each position

    M <- sigmoid(decay)^(1/16) M                        it forgets
    M <- M + k (sigmoid(rate) (v - M^T k))^T            what it holds for a key moves towards the value
    out = M^T q / sqrt(D)

Sums in FP32. Returns [B, H, S, D] in q's dtype. See: Yang et al., "Gated Delta Networks", 2024, equation 10; the decay
is that of Yang et al., "Gated Linear Attention", 2023, one per head.
"""

import torch
from torch import Tensor

from tilewright.core.hardware import Machine
from tilewright.ops.backends.native import attention as native
from tilewright.ops.backends.native import wide
from tilewright.ops.backends.native.varlen_availability import (
    FLASH_WIDTH,
    KINDS,
    WINDOW,
    why_not_efficient,
    why_not_varlen,
)
from tilewright.ops.backends.ref import linear_attention as ref_linear
from tilewright.ops.backends.ref import math as ref
from tilewright.ops.base.dispatch import Candidate, Case, Op, always
from tilewright.ops.base.documents import Documents, Segments


def _amx(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
):
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    return attention.by_amx(q, k, v, segments, scale, block, window)


def _why_not_amx(machine: Machine, case: Case) -> str | None:
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    return attention.why_not_amx(machine, case)


def _avx512(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
):
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    return attention.by_avx512(q, k, v, segments, scale, block, window)


def _why_not_avx512(machine: Machine, case: Case) -> str | None:
    from tilewright.ops.backends.cpu import attention  # it registers torch operators

    return attention.why_not_avx512(machine, case)


def _wide(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
):
    if isinstance(segments, Documents):
        return _by_loop(q, k, v, segments, scale, window)
    from tilewright.ops.backends.native import wide_ops  # it registers torch operators

    return wide_ops.attention(q, k, v, segments, scale, block, window)


def _native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
):
    if isinstance(segments, Documents):
        return _by_loop(q, k, v, segments, scale, window)
    return native.attention(q, k, v, segments, scale, block, window)


def _by_loop(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None, window: int):
    from tilewright.ops.backends import document_attention  # it registers torch operators

    return document_attention.attention(q, k, v, documents, scale, window)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
):
    from tilewright.ops.backends.native import varlen_attention  # it registers torch operators

    return varlen_attention.by_flash(q, k, v, segments, scale, block, window)


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
):
    from tilewright.ops.backends.native import varlen_attention  # it registers torch operators

    return varlen_attention.by_efficient(q, k, v, segments, scale, block, window)


BY_DOCUMENTS = frozenset(("varlen", "efficient"))
"""Candidates that read where documents begin, and neither `segments` nor a mask."""
IN_CPP = frozenset(("amx", "avx512"))
"""Candidates in C++ for BF16 on CPUs, which calls of torch's function in other parties' modules go to as well."""
WITHOUT_MASK = BY_DOCUMENTS | IN_CPP | {"wide"}
"""Candidates that hold nothing of all pairs of positions, compiled or not."""
ATTENTION = Op(
    "attention",
    (
        Candidate("amx", _amx, _why_not_amx),
        Candidate("avx512", _avx512, _why_not_avx512),
        Candidate("wide", _wide, wide.why_not),
        Candidate("varlen", _varlen, why_not_varlen),
        Candidate("efficient", _efficient, why_not_efficient),
        Candidate("native", _native, always),
        Candidate("ref", ref.attention, always),
    ),
    kinds=("", WINDOW),
    gpu_kinds=KINDS,
    in_transforms=ref.attention,
)


def _chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, segments: Tensor | None = None) -> Tensor:
    from tilewright.ops.backends import linear_attention  # it registers torch operators

    return linear_attention.attention(q, k, v, decay, rate, segments)


LINEAR_ATTENTION = Op(
    "linear_attention",
    (Candidate("chunked", _chunked, always), Candidate("ref", ref_linear.attention, always)),
    in_transforms=ref_linear.attention,
)


def reads_documents(candidate: str, device_type: str) -> bool:
    """True if attention's candidate reads `Documents`. On CPUs those without a kernel that skips go through them one by
    one; the kernels in C++ skip what `segments` say."""
    return candidate in BY_DOCUMENTS or (device_type == "cpu" and candidate in ("wide", "native"))


def keeps_mask(candidate: str, device_type: str, dtype: torch.dtype) -> bool:
    """True if attention of packed rows outside of compiled code keeps a mask of all pairs of positions for backward.
    None is kept of a window. Of FP32 operands on a CPU it goes by blocks, whichever candidate it is."""
    return candidate not in WITHOUT_MASK and (device_type != "cpu" or dtype.itemsize < 4)


def attention_kind(device_type: str, head_dim: int, packed: bool, windowed: bool = False) -> str:
    """Name the kind of an attention call; on CPUs the window alone decides it.

    Example:
        >>> attention_kind("cuda", 128, True), attention_kind("cuda", 512, False), attention_kind("cpu", 512, True)
        ('packed', 'wide', '')
    """
    if device_type == "cpu":
        return WINDOW if windowed else ""
    names = ((WINDOW, windowed), ("packed", packed and not windowed), ("wide", head_dim > FLASH_WIDTH))
    return "_".join(name for name, is_so in names if is_so)

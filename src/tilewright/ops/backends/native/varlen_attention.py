"""Causal attention by documents on torch's CUDA kernels: no mask, no scores of S x S, no work between documents.

`scaled_dot_product_attention` cannot say it: flash takes no mask, the memory-efficient kernel takes no grouped heads,
and what neither takes, torch computes with all scores in memory. Both kernels themselves take the starts of documents.
They are called in operators of ours, since torch 2.13 has a wrong shape function for backward of the memory-efficient
one, so that compiling it fails.

Flash takes a window: of each position the keys up to so many before it.

Legend: B rows  H query heads  K key heads  S positions  D width  T tokens of all rows  N documents.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.attention_parts import padded_values
from tilewright.ops.backends.native.varlen_availability import NO_WINDOW, WINDOW
from tilewright.ops.backends.ref.math import score_scale
from tilewright.ops.base.documents import Documents, Segments, documents_of, rows_as_documents

_ALIGNED = 8
"""Widths of heads that both kernels take are multiples of this."""
_LSE_ALIGNED = 32
"""The memory-efficient kernel keeps a multiple of so many sums of a document."""
_CAUSAL = 1
"""`custom_mask_type` of the memory-efficient kernel: from the top left."""


def by_flash(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    segments: Segments = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute varlen attention by FlashAttention: see `ops.attention`. Grouped heads are taken as they are. It uses
    blocks of its own: `block` changes nothing."""
    return _attention(q_BHSD, k_BKSD, v_BKSD, segments, scale, window, flash=True)


def by_efficient(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    segments: Segments = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute varlen attention by the memory-efficient kernel: see `ops.attention`. Keys and values are repeated for
    grouped heads. `block` changes nothing."""
    NO_WINDOW.check(WINDOW if window else "")
    group = q_BHSD.shape[1] // k_BKSD.shape[1]
    if group > 1:
        k_BKSD, v_BKSD = (x.repeat_interleave(group, dim=1) for x in (k_BKSD, v_BKSD))
    return _attention(q_BHSD, k_BKSD, v_BKSD, segments, scale, 0, flash=False)


def _attention(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, segments: Segments, scale: float | None, window: int, *, flash: bool
) -> Tensor:
    scale = score_scale(q_BHSD, scale)
    rows, _, length, _ = q_BHSD.shape
    if segments is None:
        starts_N1, longest = rows_as_documents(rows, length, q_BHSD.device)
    else:
        found = segments if isinstance(segments, Documents) else documents_of(segments)
        starts_N1, longest = found.starts_N1, found.longest
    operands = (_tokens(x) for x in (q_BHSD, k_BKSD, padded_values(q_BHSD, v_BKSD)))
    out_THD = _Attention.apply(*operands, starts_N1, longest, scale, flash, window)
    return out_THD[..., : v_BKSD.shape[-1]].unflatten(0, (rows, length)).transpose(1, 2)


def _tokens(x_BHSD: Tensor) -> Tensor:
    """Tokens for varlen attention: [T, H, D] with D a multiple of `_ALIGNED` and contiguous: the same memory where
    heads are inside of positions."""
    pad = -x_BHSD.shape[-1] % _ALIGNED
    x_THD = (F.pad(x_BHSD, (0, pad)) if pad else x_BHSD).transpose(1, 2).flatten(0, 1)
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TKD, v_TKD, starts_N1, longest, scale, flash, window):
        out_THD, lse = _forward(q_THD, k_TKD, v_TKD, starts_N1, longest, scale, flash, window)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, starts_N1, out_THD, lse)
        ctx.options = longest, scale, flash, window
        return out_THD

    @staticmethod
    def backward(ctx, dout_THD):
        return *_backward(*ctx.saved_tensors, dout_THD, *ctx.options), None, None, None, None, None


@torch.library.custom_op("tilewright::varlen_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float, flash: bool, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Run varlen attention forward: result [T, H, D], and log-sum-exp in FP32: [H, T] of flash, [N, H, longest] of the
    memory-efficient kernel."""
    if flash:
        lengths = (starts, starts, longest, longest)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, True, False, scale=scale, **_sides(window)
        )
        return out, lse
    lengths, operands = _lengths_within(starts, longest, q), (x[None] for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        *operands, None, *lengths, 0.0, _CAUSAL, True, scale=scale
    )
    return out[0], lse


@_forward.register_fake
def _(q, k, v, starts, longest, scale, flash, window=0):
    tokens, heads, _ = q.shape
    sums = -(-torch.sym_min(longest, tokens) // _LSE_ALIGNED) * _LSE_ALIGNED
    shape = (heads, tokens) if flash else (starts.shape[0] - 1, heads, sums)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("tilewright::varlen_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, out: Tensor, lse: Tensor, dout: Tensor, longest: int, scale: float,
    flash: bool, window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dout = dout.contiguous()
    if flash:
        lengths = (starts, starts, longest, longest)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)  # of no dropout
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, True, *state, scale=scale, **_sides(window)
        )
    state = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    lengths = _lengths_within(starts, longest, q)
    dout, q, k, v, out = (x[None] for x in (dout, q, k, v, out))
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        dout, q, k, v, None, out, *lengths, lse, 0.0, *state, _CAUSAL, False, scale=scale
    )
    return dq[0], dk[0], dv[0]


@_backward.register_fake
def _(q, k, v, starts, out, lse, dout, longest, scale, flash, window=0):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _sides(window: int) -> dict[str, int]:
    """Sides of a window in varlen attention, as flash takes them: keys before a position, and behind it."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _lengths_within(starts: Tensor, longest: int, q_THD: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Bound the longest document by the number of tokens: the memory-efficient kernel refuses a greater length."""
    longest = min(longest, q_THD.shape[0])
    return starts, starts, longest, longest

"""Operators that multiply in FP32 on CPUs: a linear layer of 16-bit operands, and attention. See `wide`.

Kept for backward is what came in, in 16 bits. One operator per GEMM, and one per pass of attention: recomputation and
the compiler keep its 16-bit result, never an FP32 one, and what runs is the same in compiled code and outside of it.

Attention is torch's flash kernel, forward and backward: of FP32 operands its backward takes 2.4 times its forward, of
16-bit ones 14 times where the CPU does not multiply them (docs/log.md, 2026-11-25). Where there are documents or a
window it goes by blocks of query rows, each with the keys that they may see, so that no mask is S x S.

Legend: M out features or rows  N rows  K columns; B batch  H query heads  K key heads  S positions  D width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.attention_parts import expand, padded_values, query_blocks
from tilewright.ops.backends.ref.math import score_scale
from tilewright.ops.base.deferred_linear import LinearGemms


def linear(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """Run a linear layer that multiplies in FP32 (wide): see `ops.linear`. The weight's gradient stays in FP32 if the
    weight is: it is summed in FP32 here, and rounding would cost time."""
    return _WideLinear.apply(x, weight_MK, bias_M)


def _plain_gemm(a: Tensor, b_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    bias = None if bias_N is None else bias_N.float()
    with torch.autocast("cpu", enabled=False):  # a caller's would round them again
        return F.linear(a.float(), b_NK.float(), bias).to(dtype)


@torch.library.custom_op("tilewright::wide_gemm", mutates_args=())
def _gemm(a: Tensor, b_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _plain_gemm(a, b_NK, bias_N, dtype)


@_gemm.register_fake
def _(a, b_NK, bias_N, dtype):
    return a.new_empty((*a.shape[:-1], b_NK.shape[0]), dtype=dtype)


class _WideLinear(torch.autograd.Function):
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
        dy_NM = dy.reshape(-1, dy.shape[-1])
        gemm = _plain_gemm if torch.is_grad_enabled() else _gemm  # of which there is no derivative
        dx = gemm(dy, narrow_MK.T, None, dy.dtype) if wants_dx else None
        dw = gemm(dy_NM.T, x.reshape(-1, x.shape[-1]).T, None, ctx.weight_dtype) if wants_dw else None
        db = dy_NM.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if wants_db else None
        return dx, dw, db


LINEAR_GEMMS = LinearGemms(
    fprop=lambda x, narrow_MK, bias_M: _gemm(x, narrow_MK, bias_M, x.dtype),
    dgrad=lambda dy, narrow_MK: _gemm(dy, narrow_MK.T, None, dy.dtype),
    wgrad=lambda dy_NM, x_NK, dtype: _gemm(dy_NM.T, x_NK.T, None, dtype),
    bgrad=lambda dy_NM, dtype: dy_NM.sum(0, dtype=torch.float32).to(dtype),
)
"""The matmuls of `linear`, one by one."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """A matmul that multiplies wide: `torch.matmul` of 16-bit operands of two dims at least, [..., M, K] and [..., K,
    N], leading ones broadcast."""
    return _WideMatmul.apply(a, b)


def _plain_batched_gemm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(a.float(), b.float()).to(dtype)


@torch.library.custom_op("tilewright::wide_batched_gemm", mutates_args=())
def _batched_gemm(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return _plain_batched_gemm(a, b, dtype)


@_batched_gemm.register_fake
def _(a, b, dtype):
    leading = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.new_empty((*leading, a.shape[-2], b.shape[-1]), dtype=dtype)


class _WideMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _batched_gemm(a, b, a.dtype)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        wants_da, wants_db = ctx.needs_input_grad
        gemm = _plain_batched_gemm if torch.is_grad_enabled() else _batched_gemm
        da = gemm(dy, b.mT, a.dtype).sum_to_size(a.shape) if wants_da else None
        db = gemm(a.mT, dy, b.dtype).sum_to_size(b.shape) if wants_db else None
        return da, db


def attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    segments_BS: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute attention that multiplies in FP32 (wide): see `ops.attention`."""
    scale = score_scale(q_BHSD, scale)
    v = padded_values(q_BHSD, v_BKSD)
    out = _WideAttention.apply(q_BHSD, k_BKSD, v, segments_BS, scale, block, window)
    return out if v is v_BKSD else out[..., : v_BKSD.shape[-1]]


class _WideAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, block, window):
        out_BHSD, lse_BHS = _attention(q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, block, window)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, segments_BS)
        ctx.options = scale, block, window
        return out_BHSD

    @staticmethod
    def backward(ctx, dout_BHSD):
        return *_attention_backward(*ctx.saved_tensors, dout_BHSD, *ctx.options), None, None, None, None


@torch.library.custom_op("tilewright::wide_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, scale: float, block: int, window: int
) -> tuple[Tensor, Tensor]:
    """Run attention that multiplies in FP32 forward: result [B, H, S, D], and log-sum-exp of the scores in FP32 [B, H,
    S]."""
    out, lse = _heads_inside(q), q.new_empty(q.shape[:3], dtype=_high(q))
    queries, keys, values = q.to(_high(q)), _widened(k, q), _widened(v, q)
    for rows, seen, causal, mask in query_blocks(_length(q), segments, block, window, _high(q)):
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries[:, :, rows], keys[:, :, seen], values[:, :, seen], 0.0, causal, attn_mask=mask, scale=scale
        )
        out[:, :, rows], lse[:, :, rows] = part, part_lse
    return out, lse


@_attention.register_fake
def _(q, k, v, segments, scale, block, window):
    return _heads_inside(q), q.new_empty(q.shape[:3], dtype=_high(q))


@torch.library.custom_op("tilewright::wide_attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Tensor | None, dout: Tensor,
    scale: float, block: int, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    high, group = _high(q), q.shape[1] // k.shape[1]
    queries, done, upstream = (x.to(high) for x in (q, out, dout))
    keys, values = _widened(k, q), _widened(v, q)
    dq, dk, dv = _heads_inside(q), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, seen, causal, mask in query_blocks(_length(q), segments, block, window, high):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            upstream[:, :, rows], queries[:, :, rows], keys[:, :, seen], values[:, :, seen], done[:, :, rows],
            lse[:, :, rows], 0.0, causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        dq[:, :, rows] = found[0]
        dk[:, :, seen] += found[1]
        dv[:, :, seen] += found[2]
    if group > 1:
        dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
    return dq, _heads_inside(k).copy_(dk), _heads_inside(v).copy_(dv)


@_attention_backward.register_fake
def _(q, k, v, out, lse, segments, dout, scale, block, window):
    return _heads_inside(q), _heads_inside(k), _heads_inside(v)


def _length(q_BHSD: Tensor) -> int:
    """The positions of wide operands; 0 where nothing is to be computed."""
    return q_BHSD.shape[2] if q_BHSD.numel() else 0


def _widened(x_BKSD: Tensor, q_BHSD: Tensor) -> Tensor:
    return expand(x_BKSD.to(_high(x_BKSD)), q_BHSD.shape[1] // x_BKSD.shape[1])


def _high(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_inside(x_BHSD: Tensor) -> Tensor:
    """An empty result for wide attention of the same shape, [B, S, H, D] in memory: what the projections beside it
    take."""
    batch, heads, positions, width = x_BHSD.shape
    return x_BHSD.new_empty((batch, positions, heads, width)).transpose(1, 2)

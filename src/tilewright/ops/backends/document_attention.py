"""Causal attention on CPUs, one document after the other: the sum of their lengths squared is all that is computed.

torch's flash kernel takes a mask of all pairs of positions or none. Here it takes none: each document is a call of its
own, causal, so that nothing is computed between documents, and no mask is made. A document longer than a window goes
by blocks of query rows, each with the keys that they may see and a mask of these. One operator per pass, compiled or
not: how many documents there are is no part of a graph.

It multiplies in FP32, operands of 16 bits too: torch's kernel is the faster one there, backward above all, and oneDNN
keeps code for each length of 16-bit operands that it has seen, of which documents have hundreds (docs/log.md,
2026-11-26).

Legend: B rows  H query heads  K key heads  S positions  D width  N documents  L tokens of a document.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewright.ops.backends.attention_parts import expand, padded_values, query_blocks
from tilewright.ops.backends.ref.math import score_scale
from tilewright.ops.base.documents import Documents


def attention(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, documents: Documents, scale: float | None = None, window: int = 0
) -> Tensor:
    """Compute attention document by document on a CPU: see `ops.attention`. Padding, of segment -1, gives zeros.

    Args:
        q_BHSD, k_BKSD, v_BKSD: on the CPU.
        documents: of the rows.
        scale: of the scores.
        window: see `ops.attention`.
    """
    scale = score_scale(q_BHSD, scale)
    v = padded_values(q_BHSD, v_BKSD)
    out = _Attention.apply(q_BHSD, k_BKSD, v, documents.segments_BS, documents.starts_N1, scale, window)
    return out if v is v_BKSD else out[..., : v_BKSD.shape[-1]]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHSD, k_BKSD, v_BKSD, segments_BS, starts_N1, scale, window):
        out_BHSD, lse_BHS = _forward(q_BHSD, k_BKSD, v_BKSD, segments_BS, starts_N1, scale, window)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, segments_BS, starts_N1, out_BHSD, lse_BHS)
        ctx.options = scale, window
        return out_BHSD

    @staticmethod
    def backward(ctx, dout_BHSD):
        return *_backward(*ctx.saved_tensors, dout_BHSD, *ctx.options), None, None, None, None


@torch.library.custom_op("tilewright::document_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, starts: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Run attention by documents forward: result [B, H, S, D], and log-sum-exp of the scores [B, H, S] in FP32, or
    FP64."""
    out, lse = _heads_inside(q).zero_(), q.new_zeros(q.shape[:3], dtype=_high(q))
    group = q.shape[1] // k.shape[1]
    for row, here in _documents(segments, starts):
        queries, keys, values = (_taken(x, row, here) for x in (q, k, v))
        keys, values = expand(keys, group), expand(values, group)
        of_out, of_lse = out[row : row + 1, :, here], lse[row : row + 1, :, here]
        for rows, seen, causal, mask in query_blocks(queries.shape[2], None, 0, window, queries.dtype):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[:, :, rows], keys[:, :, seen], values[:, :, seen], 0.0, causal, attn_mask=mask, scale=scale
            )
            of_out[:, :, rows], of_lse[:, :, rows] = part, part_lse
    return out, lse


@_forward.register_fake
def _(q, k, v, segments, starts, scale, window):
    return _heads_inside(q), q.new_empty(q.shape[:3], dtype=_high(q))


@torch.library.custom_op("tilewright::document_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, starts: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (_heads_inside(x).zero_() for x in (q, k, v))
    heads = k.shape[1], q.shape[1] // k.shape[1]
    for row, here in _documents(segments, starts):
        upstream, queries, keys, values, done = (_taken(x, row, here) for x in (dout, q, k, v, out))
        keys, values, of_lse = expand(keys, heads[1]), expand(values, heads[1]), lse[row : row + 1, :, here]
        sums = [torch.zeros_like(x) for x in (keys, values)] if 0 < window < queries.shape[2] else None
        for rows, seen, causal, mask in query_blocks(queries.shape[2], None, 0, window, queries.dtype):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                upstream[:, :, rows], queries[:, :, rows], keys[:, :, seen], values[:, :, seen], done[:, :, rows],
                of_lse[:, :, rows], 0.0, causal, attn_mask=mask, scale=scale,
            )  # fmt: skip
            dq[row : row + 1, :, here][:, :, rows] = found[0]
            for total, part in zip(sums or (), found[1:], strict=False):
                total[:, :, seen] += part
        for gradient, total in zip((dk, dv), sums or found[1:], strict=True):
            gradient[row, :, here] = total[0] if heads[1] == 1 else total[0].unflatten(0, heads).sum(1)
    return dq, dk, dv


@_backward.register_fake
def _(q, k, v, segments, starts, out, lse, dout, scale, window):
    return _heads_inside(q), _heads_inside(k), _heads_inside(v)


def _documents(segments_BS: Tensor, starts_N1: Tensor) -> Iterator[tuple[int, slice]]:
    """The row and the positions of each document; padding is left out."""
    length = segments_BS.shape[1]
    kept = (segments_BS.flatten()[starts_N1[:-1].long()] >= 0).tolist()
    bounds = starts_N1.tolist()
    for start, end, keep in zip(bounds[:-1], bounds[1:], kept, strict=True):
        if keep:
            row = start // length
            yield row, slice(start - row * length, end - row * length)


def _taken(x_BHSD: Tensor, row: int, here: slice) -> Tensor:
    """Tensors taken of one document for attention: [1, H, L, D]."""
    part = x_BHSD[row : row + 1, :, here]
    return part.to(_high(part))


def _high(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _heads_inside(x_BHSD: Tensor) -> Tensor:
    """An empty result for attention by documents of the same shape, [B, S, H, D] in memory: what the projections beside
    it take."""
    batch, heads, positions, width = x_BHSD.shape
    return x_BHSD.new_empty((batch, positions, heads, width)).transpose(1, 2)

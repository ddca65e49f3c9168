"""Causal document attention on torch's own kernels, with a backward of ours on CPU.

torch's CPU flash backward took five times its forward on BF16 (docs/log.md, 2026-11-20).
Here the forward is torch's flash kernel, and the backward recomputes probabilities from the saved
log-sum-exp in blocks of query rows: five batched GEMMs and two element-wise loops a block, and no work
above the diagonal. The loops fuse only under torch.compile, so the eager path keeps torch's backward.
Of FP32 operands torch's backward is the faster one, compiled or not: `wide_ops`.

With `block` query rows at a time, on any device and eager too, the forward goes by blocks as well: neither scores
nor the mask of packed documents are ever S x S. Eager on a CPU, torch's own backward runs block by block and holds no
scores at all; elsewhere those of a block are in memory, [B, H, R, E] a few times over.

A window goes by blocks too, each with the keys that its rows may see; on a CPU by `wide_ops`, in FP32.

Legend: B batch, H query heads, G query heads a key head, K key heads (H = K * G), S positions, D width,
R rows of a query block, E keys that the block may see, T positions of keys where queries are the last S of them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.ops.backends.attention_parts import (
    added_mask,
    allowed_block,
    block_rows,
    expand,
    first_key,
    padded_values,
)
from tilewright.ops.backends.ref.math import allowed_pairs, score_scale


def attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    segments_BS: Tensor | None = None,
    scale: float | None = None,
    block: int = 0,
    window: int = 0,
) -> Tensor:
    """Compute attention by torch's kernels: see `ops.attention`. Values narrower than keys (multi-head latent
    attention) are padded: no kernel takes them."""
    scale = score_scale(q_BHSD, scale)
    v = padded_values(q_BHSD, v_BKSD)
    on_cpu, low = q_BHSD.device.type == "cpu", q_BHSD.dtype in (torch.bfloat16, torch.float16)
    compiled = torch.compiler.is_compiling() and on_cpu and q_BHSD.requires_grad
    if on_cpu and (window or (not low and (block or compiled or segments_BS is not None))):
        from tilewright.ops.backends.native import wide_ops  # it registers torch operators

        return wide_ops.attention(q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, block, window)
    if block or compiled or window:
        out = _Blocked.apply(q_BHSD, k_BKSD, v, segments_BS, scale, block, window)
    else:
        out = _sdpa(q_BHSD, k_BKSD, v, segments_BS, scale)
    return out if v is v_BKSD else out[..., : v_BKSD.shape[-1]]


def attention_to_past(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float | None = None, *, wide: bool = False, window: int = 0
) -> Tensor:
    """Compute attention of the last S of T positions, S < T, to the last `window` positions up to themselves (0: to
    all), by torch's kernels. Without documents.

    `wide`: with FP32 operands, the result in q's dtype.
    """
    if unseen := first_key(k_BKTD.shape[2] - q_BHSD.shape[2], window):
        k_BKTD, v_BKTD = k_BKTD[:, :, unseen:], v_BKTD[:, :, unseen:]
    if wide:
        operands = q_BHSD.float(), k_BKTD.float(), v_BKTD.float()
        with torch.autocast(q_BHSD.device.type, enabled=False):
            return attention_to_past(*operands, scale, window=window).to(q_BHSD.dtype)
    scale = score_scale(q_BHSD, scale)
    v = padded_values(q_BHSD, v_BKTD)
    num_new, num_all, num_keys = q_BHSD.shape[2], k_BKTD.shape[2], k_BKTD.shape[1]
    if num_new == 1:  # the queries of a key head see the same positions: one row each of one matmul
        rows, num_heads, _, dim = q_BHSD.shape
        q_BKGD = q_BHSD.reshape(rows, num_keys, num_heads // num_keys, dim)
        out = F.scaled_dot_product_attention(q_BKGD, k_BKTD, v, scale=scale).reshape(q_BHSD.shape)
    else:
        allowed_ST = torch.ones(num_new, num_all, dtype=torch.bool, device=q_BHSD.device).tril(num_all - num_new)
        if window:
            allowed_ST = allowed_ST.triu(num_all - num_new - window + 1)
        grouped = q_BHSD.shape[1] != num_keys
        out = F.scaled_dot_product_attention(q_BHSD, k_BKTD, v, attn_mask=allowed_ST, scale=scale, enable_gqa=grouped)
    return out if v is v_BKTD else out[..., : v_BKTD.shape[-1]]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, segments_BS: Tensor | None, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if segments_BS is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    allowed = allowed_pairs(segments_BS, q.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=grouped)


def _whole_forward(q: Tensor, k: Tensor, v: Tensor, segments_BS: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Forward of attention by torch, whole: result and log-sum-exp of all rows at once, on the CPU; a mask of S x S
    where there are documents."""
    mask = None
    if segments_BS is not None:
        mask = added_mask(allowed_pairs(segments_BS, q.shape[2], q.device), q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _blocked_forward(
    q: Tensor, k: Tensor, v: Tensor, segments_BS: Tensor | None, scale: float, block: int, window: int
) -> tuple[Tensor, Tensor]:
    """Forward of attention by torch in blocks of query rows, each with the keys that they may see."""
    out, lse = torch.empty_like(q), []
    for start in range(0, q.shape[2], block):
        end = min(start + block, q.shape[2])
        allowed, first = allowed_block(segments_BS, start, end, q.device, window), first_key(start, window)
        rows, keys, values = q[:, :, start:end], k[:, :, first:end], v[:, :, first:end]
        if q.device.type == "cpu":
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows, keys, values, 0.0, False, attn_mask=added_mask(allowed, q.dtype), scale=scale
            )
        else:
            part, part_lse = rows_by_matmuls(rows, keys, values, allowed, scale)
        out[:, :, start:end] = part
        lse.append(part_lse)
    return out, torch.cat(lse, dim=2)


def rows_by_matmuls(
    q_BHRD: Tensor, k_BHED: Tensor, v_BHED: Tensor, allowed: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of a block of query rows by torch's matmuls: result and log-sum-exp, scores in memory. It is
    for devices whose kernels give no log-sum-exp under a mask."""
    high = torch.promote_types(q_BHRD.dtype, torch.float32)
    scores_BHRE = (torch.matmul(q_BHRD, k_BHED.mT).to(high) * scale).masked_fill(~allowed, float("-inf"))
    lse_BHR = scores_BHRE.logsumexp(-1)
    return torch.matmul(scores_BHRE.sub_(lse_BHR[..., None]).exp_().to(q_BHRD.dtype), v_BHED), lse_BHR


class _Blocked(torch.autograd.Function):
    """Forward by flash, whole or by blocks; blocked recomputing backward."""

    @staticmethod
    def forward(ctx, q_BHSD, k_BKSD, v_BKSD, segments_BS, scale, block, window):
        group = q_BHSD.shape[1] // k_BKSD.shape[1]
        operands = (q_BHSD, expand(k_BKSD, group), expand(v_BKSD, group), segments_BS, scale)
        rows = block_rows(block, window)
        by_blocks = block or window
        out_BHSD, lse_BHS = _blocked_forward(*operands, rows, window) if by_blocks else _whole_forward(*operands)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, segments_BS)
        ctx.scale, ctx.block, ctx.window = scale, rows, window
        ctx.by_flash = q_BHSD.device.type == "cpu" and not torch.compiler.is_compiling()
        return out_BHSD

    @staticmethod
    def backward(ctx, dout_BHSD):
        if ctx.by_flash:
            return (
                *_flash_backward(ctx.saved_tensors, dout_BHSD, ctx.scale, ctx.block, ctx.window),
                None,
                None,
                None,
                None,
            )
        # Probabilities are recomputed from the log-sum-exp, for some query rows and the keys that they may see at a
        # time.
        q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, segments_BS = ctx.saved_tensors
        num_keys, num_positions = k_BKSD.shape[1], q_BHSD.shape[2]
        group = q_BHSD.shape[1] // num_keys
        k, v = expand(k_BKSD, group), expand(v_BKSD, group)
        high, low = lse_BHS.dtype, q_BHSD.dtype
        # The softmax's own term: sum over keys of P * dP = sum over width of dO * O.
        delta_BHS1 = (dout_BHSD.to(high) * out_BHSD.to(high)).sum(-1, keepdim=True)
        dq_blocks = []
        dk_BHSD, dv_BHSD = torch.zeros_like(k, dtype=high), torch.zeros_like(v, dtype=high)
        for start in range(0, num_positions, ctx.block):
            end, first = min(start + ctx.block, num_positions), first_key(start, ctx.window)
            q, dout = q_BHSD[:, :, start:end], dout_BHSD[:, :, start:end]
            scores_BHRE = torch.matmul(q, k[:, :, first:end].mT)  # [R, D] @ [D, E] -> [R, E]
            dprobs_BHRE = torch.matmul(dout, v[:, :, first:end].mT)  # [R, D] @ [D, E] -> [R, E]
            allowed = allowed_block(segments_BS, start, end, q.device, ctx.window)
            probs_BHRE = torch.exp(scores_BHRE.to(high) * ctx.scale - lse_BHS[:, :, start:end, None])
            probs_BHRE = torch.where(allowed, probs_BHRE, 0.0)
            dscores = (probs_BHRE * (dprobs_BHRE.to(high) - delta_BHS1[:, :, start:end]) * ctx.scale).to(low)
            dv_BHSD[:, :, first:end] += torch.matmul(probs_BHRE.to(low).mT, dout)  # [E, R] @ [R, D] -> [E, D]
            dk_BHSD[:, :, first:end] += torch.matmul(dscores.mT, q)  # [E, R] @ [R, D] -> [E, D]
            dq_blocks.append(torch.matmul(dscores, k[:, :, first:end]))  # [R, E] @ [E, D] -> [R, D]
        # Each key head has served a group of query heads.
        if group > 1:
            dk_BHSD, dv_BHSD = (x.unflatten(1, (num_keys, group)).sum(2) for x in (dk_BHSD, dv_BHSD))
        return torch.cat(dq_blocks, dim=2).to(low), dk_BHSD.to(low), dv_BHSD.to(low), None, None, None, None


def _flash_backward(
    saved: tuple, dout_BHSD: Tensor, scale: float, block: int, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run attention backward by torch's CPU kernel: gradients of queries, keys and values, a block of query rows at a
    time."""
    q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, segments_BS = saved
    num_keys, num_positions, low = k_BKSD.shape[1], q_BHSD.shape[2], q_BHSD.dtype
    group = q_BHSD.shape[1] // num_keys
    k, v = expand(k_BKSD, group), expand(v_BKSD, group)
    high = torch.promote_types(low, torch.float32)
    dq_BHSD = torch.empty_like(q_BHSD)
    dk_BHSD, dv_BHSD = torch.zeros_like(k, dtype=high), torch.zeros_like(v, dtype=high)
    for start in range(0, num_positions, block):
        end, first = min(start + block, num_positions), first_key(start, window)
        mask = added_mask(allowed_block(segments_BS, start, end, q_BHSD.device, window), low)
        rows = (x[:, :, start:end] for x in (dout_BHSD, q_BHSD))
        done = (out_BHSD[:, :, start:end], lse_BHS[:, :, start:end])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, k[:, :, first:end], v[:, :, first:end], *done, 0.0, False, attn_mask=mask, scale=scale
        )
        dq_BHSD[:, :, start:end] = dq
        dk_BHSD[:, :, first:end] += dk
        dv_BHSD[:, :, first:end] += dv
    if group > 1:
        dk_BHSD, dv_BHSD = (x.unflatten(1, (num_keys, group)).sum(2) for x in (dk_BHSD, dv_BHSD))
    return dq_BHSD, dk_BHSD.to(low), dv_BHSD.to(low)

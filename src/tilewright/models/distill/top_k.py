"""A teacher's likeliest tokens at each position, as they are kept on disk, and the loss of a student that learns from
them.

Of each position are kept the numbers of K tokens and their log-probabilities at the teacher's temperature, and the
log-probability of all others together. The divergence is that of K + 1 groups: what the teacher thinks of the others
one by one is not known, and the student spreads their share as it does. So it is never above the divergence of the
whole distributions, and equals it where both spread that share alike.

Kept as integers: tokens in 2 bytes (3 from 65,537 tokens on), log-probabilities in 2 bytes, in steps of 2^-11 nats.

Legend: N positions  C positions of a chunk  K tokens that are kept  G = K + 1 groups  V vocabulary.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.models.base.head import IGNORED_LABEL
from tilewright.models.distill.divergences import Teaching, divergences

_STEPS, _LEAST = 2.0**11, 2**16 - 1
"""Steps per nat; the smallest log-probability, -32, is that of 1e-14."""
_SMALL_VOCABULARY = 2**16


def bytes_per_position(top_k: int, vocab_size: int) -> int:
    """Bytes of a position on disk.

    Example:
        >>> bytes_per_position(32, 4096), bytes_per_position(32, 150_000)
        (130, 162)
    """
    return top_k * _token_bytes(vocab_size) + 2 * (top_k + 1)


def handed_on_bytes(top_k: int) -> int:
    """Bytes of a position in a batch: tokens in int64, log-probabilities of groups in FP32.

    Example:
        >>> handed_on_bytes(32)
        388
    """
    return 8 * top_k + 4 * (top_k + 1)


def top_k_of(log_CV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens.

    Args:
        log_CV: log-probabilities, FP32.
        top_k: fewer than V.

    Returns:
        Tokens [C, K] int64, and log-probabilities of the groups [C, G] FP32, that of all other tokens last.
    """
    top_CK, ids_CK = log_CV.topk(top_k, -1)
    rest_C1 = log_CV.scatter(-1, ids_CK, -torch.inf).logsumexp(-1, keepdim=True)
    return ids_CK, torch.cat((top_CK, rest_C1), -1)


def encode(ids_NK: Tensor, log_NG: Tensor, vocab_size: int) -> np.ndarray:
    """Bytes of positions, uint8 [N, `bytes_per_position`]; see the top of the file.

    Args:
        ids_NK: tokens.
        log_NG: log-probabilities of groups, at most 0.
        vocab_size: V.
    """
    width = _token_bytes(vocab_size)
    ids = ids_NK.numpy().astype("<u4")[..., None].view(np.uint8)[..., :width].reshape(len(ids_NK), -1)
    codes_NG = (log_NG * -_STEPS).round().clamp(0, _LEAST).to(torch.int32).numpy().astype("<u2")
    return np.concatenate([ids, codes_NG.view(np.uint8).reshape(len(ids), -1)], axis=1)


def decode(kept: np.ndarray, top_k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N, K] and log-probabilities FP32 [N, G], whose probabilities add up to one again.

    Args:
        kept: of `encode`.
        top_k: K.
        vocab_size: V.

    Example:
        >>> log_probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
        >>> ids, groups = decode(encode(*top_k_of(log_probs, 2), 4), 2, 4)
        >>> ids.tolist(), [round(value, 3) for value in groups.exp().flatten().tolist()]
        ([[0, 1]], [0.5, 0.25, 0.25])
    """
    width = _token_bytes(vocab_size)
    ids = np.zeros((len(kept), top_k, 4), np.uint8)
    ids[..., :width] = kept[:, : top_k * width].reshape(len(kept), top_k, width)
    codes_NG = np.ascontiguousarray(kept[:, top_k * width :]).view("<u2").astype(np.int32)
    log_NG = torch.from_numpy(codes_NG).to(torch.float32) / -_STEPS
    return torch.from_numpy(ids.view("<u4")[..., 0].astype(np.int64)), log_NG.log_softmax(-1)


def _token_bytes(vocab_size: int) -> int:
    return 2 if vocab_size <= _SMALL_VOCABULARY else 3


def top_k_loss(
    logits_CV: Tensor,
    labels_C: Tensor,
    ids_CK: Tensor,
    theirs_CG: Tensor,
    how: Teaching,
) -> tuple[Tensor, Tensor]:
    """Loss of some rows: (1 - weight) cross-entropy + weight T^2 divergence of groups, summed over targets.

    The gradient is made with the loss, from one exponential of the logits (two at another temperature than 1).

    Args:
        logits_CV: of the student, FP32.
        labels_C: int64, -100 where there is no target.
        ids_CK: the teacher's tokens.
        theirs_CG: log-probabilities of groups at the temperature.
        how: see `loss`.

    Returns:
        The sum, differentiable, and without a gradient cross-entropy and T^2 divergence of each row [C, 2].
    """
    return _TopKLoss.apply(logits_CV, labels_C, ids_CK, theirs_CG, how)


class _TopKLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: Tensor,
        labels_C: Tensor,
        ids_CK: Tensor,
        theirs_CG: Tensor,
        how: Teaching,
    ) -> tuple[Tensor, Tensor]:
        temperature, weight, divergence = how
        targets_C1 = (labels_C != IGNORED_LABEL)[:, None]
        places_C1 = labels_C.clamp_min(0)[:, None]
        total_C1 = logits_CV.logsumexp(-1, keepdim=True)
        entropy_C1 = (total_C1 - logits_CV.gather(-1, places_C1)).masked_fill(~targets_C1, 0.0)
        scaled_CV = logits_CV if temperature == 1 else logits_CV / temperature
        norm_C1 = total_C1 if temperature == 1 else scaled_CV.logsumexp(-1, keepdim=True)
        top_CK = scaled_CV.gather(-1, ids_CK) - norm_C1
        # Softmax with the teacher's tokens at zero: the sum is the others' share, free of cancellation.
        soft_CV = (scaled_CV - norm_C1).exp_().scatter_(-1, ids_CK, 0.0)
        rest_C1 = soft_CV.sum(-1, keepdim=True).clamp_min(torch.finfo(soft_CV.dtype).tiny)
        ours_CG = torch.cat((top_CK, rest_C1.log()), -1)
        with torch.enable_grad():
            ours_CG = ours_CG.detach().requires_grad_()
            each_C1 = divergences(theirs_CG, ours_CG, divergence).masked_fill(~targets_C1, 0.0)
            (slope_CG,) = torch.autograd.grad(each_C1.sum(), ours_CG)
        each_C2 = torch.cat((entropy_C1, each_C1.detach() * temperature**2), -1)
        ctx.mark_non_differentiable(each_C2)
        if ctx.needs_input_grad[0]:
            # d log q_g / d z_j = [j in g] q_j / q_g - q_j, times T^2 / T
            scale, all_C1 = weight * temperature, slope_CG.sum(-1, keepdim=True)
            own_CK = scale * (slope_CG[:, :-1] - all_C1 * top_CK.exp())
            factor_C1 = scale * (slope_CG[:, -1:] / rest_C1 - all_C1)
            share_C1 = (1 - weight) * targets_C1.to(soft_CV.dtype)
            if temperature == 1:  # the softmax of the cross-entropy is the same one
                own_CK, factor_C1 = own_CK + share_C1 * top_CK.exp(), factor_C1 + share_C1
            grad_CV = soft_CV.mul_(factor_C1).scatter_(-1, ids_CK, own_CK)
            if temperature != 1:
                grad_CV.addcmul_((logits_CV - total_C1).exp_(), share_C1)
            ctx.save_for_backward(grad_CV.scatter_add_(-1, places_C1, -share_C1))
        sums_2 = each_C2.sum(0)
        return (1 - weight) * sums_2[0] + weight * sums_2[1], each_C2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (grad_CV,) = ctx.saved_tensors
        return grad_CV * grads[0], None, None, None, None

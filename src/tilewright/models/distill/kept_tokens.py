"""Tokens of a teacher that are kept on disk: which, and their bytes.

Of each position are kept the numbers of K tokens and K + 1 logarithms. For the forward divergence, a sum over what the
teacher thinks, tokens are drawn such that the loss is right on average (`sampled`); the other divergences are not sums
of that kind, and compare groups of the likeliest (`top_k`).

Kept as integers: tokens in 2 bytes (3 from 65,537 tokens on), logarithms in 2 bytes, in steps of 2^-11 nats.

Legend: N positions  K tokens that are kept  G = K + 1 logarithms  V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewright.models.distill.divergences import divergences
from tilewright.models.distill.sampled import forward_divergence, normalized, sample_tokens
from tilewright.models.distill.top_k import top_k_of

_STEPS, _LEAST = 2.0**11, 2**16 - 1
"""Steps per nat; the smallest log-probability, -32, is that of 1e-14."""
_SMALL_VOCABULARY = 2**16


def bytes_per_position(top_k: int, vocab_size: int) -> int:
    """Bytes of a position's kept tokens on disk.

    Example:
        >>> bytes_per_position(32, 4096), bytes_per_position(32, 150_000)
        (130, 162)
    """
    return top_k * _token_bytes(vocab_size) + 2 * (top_k + 1)


def handed_on_bytes(top_k: int) -> int:
    """The bytes per position of a teacher's kept tokens in a batch: tokens in int64, logarithms in FP32.

    Example:
        >>> handed_on_bytes(32)
        388
    """
    return 8 * top_k + 4 * (top_k + 1)


class Keeping(NamedTuple):
    """Which tokens are kept for a divergence, and what they say of it.

    Args:
        name: in the folder's own record.
        choose: of log-probabilities [C, V], K and a number in [0, 1) of each position: tokens [C, K] and logarithms
            [C, G].
        normalized: of logarithms that were rounded, those of probabilities that add up to one.
        divergence: of each position [C, 1], of the teacher's logarithms and the student's log-probabilities of the
            same tokens and of all others together.
    """

    name: str
    choose: Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]
    normalized: Callable[[Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor], Tensor]


def keeping(divergence: str) -> Keeping:
    """Choose how a teacher's rows are kept for one of `DIVERGENCES`.

    Example:
        >>> [keeping(name).name for name in ("forward_kl", "reverse_kl", "jensen_shannon")]
        ['sampled', 'likeliest', 'likeliest']
    """
    if divergence == "forward_kl":
        return Keeping("sampled", sample_tokens, normalized, forward_divergence)
    return Keeping(
        "likeliest",
        lambda log_CV, top_k, _: top_k_of(log_CV, top_k),
        lambda logs_CG: logs_CG.log_softmax(-1),
        lambda theirs_CG, ours_CG: divergences(theirs_CG, ours_CG, divergence),
    )


def encode(ids_NK: Tensor, log_NG: Tensor, vocab_size: int) -> np.ndarray:
    """Encode kept tokens as bytes of positions, uint8 [N, `bytes_per_position`]; see the top of the file.

    Args:
        ids_NK: tokens.
        log_NG: logarithms, at most 0.
        vocab_size: V.
    """
    width = _token_bytes(vocab_size)
    ids = ids_NK.numpy().astype("<u4")[..., None].view(np.uint8)[..., :width].reshape(len(ids_NK), -1)
    codes_NG = (log_NG * -_STEPS).round().clamp(0, _LEAST).to(torch.int32).numpy().astype("<u2")
    return np.concatenate([ids, codes_NG.view(np.uint8).reshape(len(ids), -1)], axis=1)


def decode(kept: np.ndarray, top_k: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Decode kept tokens to int64 [N, K] and logarithms FP32 [N, G], as they were rounded.

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
    return torch.from_numpy(ids.view("<u4")[..., 0].astype(np.int64)), log_NG


def _token_bytes(vocab_size: int) -> int:
    return 2 if vocab_size <= _SMALL_VOCABULARY else 3

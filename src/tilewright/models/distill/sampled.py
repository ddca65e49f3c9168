"""Tokens drawn from a teacher's distribution, and the forward divergence that they estimate without bias.

The likeliest tokens alone say nothing of the others, which share much of the probability where a teacher is unsure: a
student that learns from them is drawn to a distribution that is too narrow (Anshumann et al., "Sparse Logit Sampling",
2025). Drawn ones say the right thing on average. Of K tokens, those of probability at least t are there for certain;
the others with probability p / t, and count as t then. t is such that it comes to K tokens, which is the draw of least
variance (Barnes et al., "Efficient Unbiased Sparsification", 2024). So each token counts as w = max(p, t), weights add
up to one, and

    sum over kept of w (log p - log q)

has the divergence of the whole distributions as its mean, and its gradient, q - w of logits, that of the whole, q - p.
That holds for sums over p alone: the other divergences are compared by groups (`top_k`).

Which tokens are drawn is a function of one number per position, so that a row that is made twice is the same.

Legend: C positions  K tokens that are kept  G = K + 1 numbers: log p of each, and log t  V vocabulary.
"""

import torch
from torch import Tensor

_LEAST = 1e-14
"""Probabilities below it count as this one, which is also the least that is kept on disk."""


def sample_tokens(log_CV: Tensor, top_k: int, numbers_C: Tensor) -> tuple[Tensor, Tensor]:
    """Sampled tokens of a teacher at each position, no two alike.

    Args:
        log_CV: log-probabilities, FP32.
        top_k: K, fewer than V.
        numbers_C: uniform in [0, 1), one per position.

    Returns:
        Tokens [C, K] int64, and [C, G] FP32: their log-probabilities, and last log t.

    Example:
        >>> log_probs = torch.tensor([[0.6, 0.2, 0.1, 0.1]]).log()
        >>> ids, logs = sample_tokens(log_probs, 2, torch.tensor([0.3]))
        >>> ids.tolist(), [round(value, 2) for value in logs.exp().flatten().tolist()]
        ([[0, 1]], [0.6, 0.2, 0.4])
    """
    p_CV = log_CV.double().exp().clamp_min(_LEAST)
    top_CK, ids_CK = p_CV.topk(top_k, -1)
    others_C1 = p_CV.scatter(-1, ids_CK, 0.0).sum(-1, keepdim=True)
    rank_K = torch.arange(top_k, device=p_CV.device)
    # With the m likeliest there for certain, the rest has top_k - m places: t is its sum over these.
    level_CK = (top_CK.flip(-1).cumsum(-1).flip(-1) + others_C1) / (top_k - rank_K)
    below_CK = (top_CK < level_CK) | (rank_K == top_k - 1)
    certain_C1 = below_CK.int().argmax(-1, keepdim=True)
    level_C1 = level_CK.gather(-1, certain_C1)
    is_certain_CK = rank_K < certain_C1
    # The rest in a row, each as long as its probability to be there; every whole step from a random start hits one.
    row_CV = p_CV.scatter(-1, ids_CK, top_CK.masked_fill(is_certain_CK, 0.0)).cumsum(-1)
    row_CV *= (top_k - certain_C1) / row_CV[:, -1:]
    points_CK = numbers_C.double()[:, None] + (rank_K - certain_C1).clamp_min(0)
    drawn_CK = torch.searchsorted(row_CV, points_CK, right=True).clamp_max(log_CV.shape[-1] - 1)
    ids_CK = torch.where(is_certain_CK, ids_CK, drawn_CK)
    return ids_CK, torch.cat((p_CV.gather(-1, ids_CK).log(), level_C1.log()), -1).float()


def normalized(logs_CG: Tensor) -> Tensor:
    """Log-probabilities of sampled, kept tokens with weights that add up to one: those that were rounded on disk do
    not."""
    return logs_CG - weights(logs_CG).log().logsumexp(-1, keepdim=True)


def weights(logs_CG: Tensor) -> Tensor:
    """Weights of sampled, kept tokens [C, K]."""
    return torch.maximum(logs_CG[:, :-1], logs_CG[:, -1:]).exp()


def forward_divergence(theirs_CG: Tensor, ours_CG: Tensor) -> Tensor:
    """Estimate the forward divergence at each position [C, 1] from sampled tokens; it may be below zero.

    Args:
        theirs_CG: of `sample_tokens`.
        ours_CG: the student's log-probabilities of the same tokens, and of all others together, which is not read.
    """
    return (weights(theirs_CG) * (theirs_CG[:, :-1] - ours_CG[:, :-1])).sum(-1, keepdim=True)

"""Divergences of a teacher's distribution p and a student's q, over tokens or over groups of them.

    forward_kl       sum p log(p / q)       q covers all that p finds likely
    reverse_kl       sum q log(q / p)       q stays where p is (Gu et al., "MiniLLM", 2023)
    jensen_shannon   mean of sum p log(p / m) and sum q log(q / m), m = (p + q) / 2 (Agarwal et al., "GKD", 2023)

Legend: C tokens of a chunk  V vocabulary, or groups of it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")


class Teaching(NamedTuple):
    """How a teacher takes part in a loss.

    Args:
        temperature: of both distributions.
        weight: share of the divergence; the rest is cross-entropy.
        divergence: one of `DIVERGENCES`.
    """

    temperature: float
    weight: float
    divergence: str


def divergences(theirs_CV: Tensor, ours_CV: Tensor, name: str) -> Tensor:
    """Divergences of teacher and student at each row [C, 1], from log-probabilities.

    Args:
        theirs_CV: log p.
        ours_CV: log q.
        name: one of `DIVERGENCES`.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> [round(float(divergences(p, q, name)), 4) for name in DIVERGENCES]
        [0.1438, 0.1308, 0.0338]
    """
    if name == "forward_kl":
        return F.kl_div(ours_CV, theirs_CV, reduction="none", log_target=True).sum(-1, keepdim=True)
    if name == "reverse_kl":
        return F.kl_div(theirs_CV, ours_CV, reduction="none", log_target=True).sum(-1, keepdim=True)
    mixed_CV = torch.logaddexp(theirs_CV, ours_CV) - math.log(2)
    both = (F.kl_div(mixed_CV, own_CV, reduction="none", log_target=True) for own_CV in (theirs_CV, ours_CV))
    return torch.stack([each_CV.sum(-1, keepdim=True) for each_CV in both]).mean(0)

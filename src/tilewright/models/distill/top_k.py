"""A teacher's likeliest tokens at each position: K of them, and all others together as one group.

A divergence of these K + 1 groups is never above that of the whole distributions, and equals it where teacher and
student spread the others' share alike: the student learns nothing of how it is spread.

Legend: C positions  K tokens that are kept  G = K + 1 groups  V vocabulary.
"""

import torch
from torch import Tensor


def top_k_of(log_CV: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top K, a teacher's likeliest tokens.

    Args:
        log_CV: log-probabilities, FP32.
        top_k: fewer than V.

    Returns:
        Tokens [C, K] int64, and log-probabilities of the groups [C, G] FP32, that of all other tokens last.
    """
    top_CK, ids_CK = log_CV.topk(top_k, -1)
    rest_C1 = log_CV.scatter(-1, ids_CK, -torch.inf).logsumexp(-1, keepdim=True)
    return ids_CK, torch.cat((top_CK, rest_C1), -1)

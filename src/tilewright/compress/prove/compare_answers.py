"""The comparison of a consumer's answer with our model on the same rows.

Legend: N answers  V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.compress.prove.held_out import ReferenceAnswer


@dataclass(frozen=True)
class AnswerDifference:
    """Difference of a consumer's answers from our model's.

    Args:
        kl: mean over N of the Kullback-Leibler divergence from our model, in nats.
        kl_max: the largest of them.
        log_prob_max: largest difference of one log-probability, among tokens of at least `LIKELY` in our model.
        top1: share of N at which the likeliest token is the same.
        clear: number of answers at which our model's likeliest token is `CLEAR` times as likely as the second.
        top1_clear: share of these at which the likeliest token is the same; None where there are none.
        loss: domain -> (our model, consumer), nats per target.
        answers: N.
        right: domain -> (our model, consumer), share of labels that are the likeliest.
    """

    kl: float
    kl_max: float
    log_prob_max: float
    top1: float
    clear: int
    top1_clear: float | None
    loss: Mapping[str, tuple[float, float]]
    answers: int
    right: Mapping[str, tuple[float, float]]


LIKELY = 1e-6
CLEAR = 2.0
"""At near ties rounding decides, and says nothing of an artefact."""


def compare(expected: ReferenceAnswer, logits_NV: np.ndarray, ours: np.ndarray | None = None) -> AnswerDifference | str:
    """Compare a consumer's answers with our model's: the difference, or in words why there is none: other shapes,
    numbers that are not finite.

    Args:
        expected: labels and domains of the answers, and the log-probabilities of our model.
        logits_NV: the consumer's.
        ours: log-probabilities [N, V] to compare with in place of those.
    """
    ours = expected.log_probs_NV if ours is None else ours
    if logits_NV.shape != ours.shape:
        return f"answered {list(logits_NV.shape)} numbers, {list(ours.shape)} were asked for"
    # Log-probabilities of tokens that a runtime rounds to nothing are minus infinity, or the lowest number.
    theirs = logits_NV.astype(np.float64)
    if np.isnan(theirs).any() or np.isposinf(theirs).any() or np.isneginf(theirs).all(axis=1).any():
        return "its logits are not finite"
    theirs -= theirs.max(axis=1, keepdims=True)
    theirs -= np.log(np.exp(theirs).sum(axis=1, keepdims=True))
    probs_NV = np.exp(ours)
    kl_N = (probs_NV * np.where(probs_NV > 0, ours - np.maximum(theirs, -1e4), 0.0)).sum(axis=1)
    at = np.arange(len(ours)), expected.labels_N
    loss = {
        name: (float(-ours[at][mine].mean()), float(-theirs[at][mine].mean()))
        for index, name in enumerate(expected.domains)
        if (mine := expected.domain_N == index).any()
    }
    best_N, their_best_N = ours.argmax(axis=1), theirs.argmax(axis=1)
    same_N, labels_N = best_N == their_best_N, expected.labels_N
    right = {
        name: (float((best_N == labels_N)[mine].mean()), float((their_best_N == labels_N)[mine].mean()))
        for index, name in enumerate(expected.domains)
        if (mine := expected.domain_N == index).any()
    }
    best_N2 = np.partition(ours, -2, axis=1)[:, -2:] if ours.shape[1] > 1 else np.zeros((len(ours), 2))
    clear_N = best_N2[:, 1] - best_N2[:, 0] >= np.log(CLEAR)
    return AnswerDifference(
        kl=max(0.0, float(kl_N.mean())),  # rounding of equal distributions may be below zero
        kl_max=float(kl_N.max()),
        log_prob_max=float(np.abs(ours - theirs)[probs_NV >= LIKELY].max()),
        top1=float(same_N.mean()),
        clear=int(clear_N.sum()),
        top1_clear=float(same_N[clear_N].mean()) if clear_N.any() else None,
        loss=loss,
        answers=len(ours),
        right=right,
    )


def as_json(difference: AnswerDifference) -> dict[str, Any]:
    """The comparison of answers as plain types."""
    loss, right = (
        {name: {"fp32": ours, "consumer": theirs} for name, (ours, theirs) in found.items()}
        for found in (difference.loss, difference.right)
    )
    return {
        "kl": difference.kl,
        "kl_max": difference.kl_max,
        "log_prob_max": difference.log_prob_max,
        "top1": difference.top1,
        "clear": difference.clear,
        "top1_clear": difference.top1_clear,
        "loss": loss,
        "answers": difference.answers,
        "right": right,
    }

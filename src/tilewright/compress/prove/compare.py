"""What a consumer's answer is worth, against our FP32 model on the same rows.

Legend: N answers  V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright.compress.prove.held_out import ReferenceAnswer


@dataclass(frozen=True)
class AnswerDifference:
    """Of an answer from the FP32 model.

    Args:
        kl: mean over N of the Kullback-Leibler divergence from the FP32 model, in nats.
        kl_max: the largest of them.
        log_prob_max: largest difference of one log-probability, among tokens of at least `LIKELY` in the FP32 model.
        top1: share of N at which the likeliest token is the same.
        loss: domain -> (FP32 model, consumer), nats per target.
        answers: N.
        token_ids: (documents with equal ids, documents), None where the artefact has no tokenizer.
    """

    kl: float
    kl_max: float
    log_prob_max: float
    top1: float
    loss: Mapping[str, tuple[float, float]]
    answers: int
    token_ids: tuple[int, int] | None


LIKELY = 1e-6


def compare(
    expected: ReferenceAnswer, logits_NV: np.ndarray, token_ids: list[list[int]] | None
) -> AnswerDifference | str:
    """The difference, or in words why there is none: other shapes, numbers that are not finite."""
    ours = expected.log_probs_NV
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
    same = None
    if token_ids is not None:
        same = sum(a == b for a, b in zip(token_ids, expected.token_ids, strict=True)), len(expected.token_ids)
    return AnswerDifference(
        kl=max(0.0, float(kl_N.mean())),  # rounding of equal distributions may be below zero
        kl_max=float(kl_N.max()),
        log_prob_max=float(np.abs(ours - theirs)[probs_NV >= LIKELY].max()),
        top1=float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean()),
        loss=loss,
        answers=len(ours),
        token_ids=same,
    )


def as_json(difference: AnswerDifference) -> dict[str, Any]:
    """Plain types."""
    loss = {name: {"fp32": ours, "consumer": theirs} for name, (ours, theirs) in difference.loss.items()}
    ids = difference.token_ids
    return {
        "kl": difference.kl,
        "kl_max": difference.kl_max,
        "log_prob_max": difference.log_prob_max,
        "top1": difference.top1,
        "loss": loss,
        "answers": difference.answers,
        "token_ids": None if ids is None else {"equal": ids[0], "documents": ids[1]},
    }

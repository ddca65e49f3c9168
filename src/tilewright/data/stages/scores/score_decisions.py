"""The decision of each score: quality by a threshold or the best share, noise by a threshold, sampling by rank."""

from collections.abc import Sequence

import numpy as np

from tilewright.data.engine.build_settings import QualitySection, SampleSection
from tilewright.data.stages.scores.keep_by_score import Judge, ScoreDecision, ScoreRanks, uniform

_DRAW = 0xD4A3


def quality_judge(quality: QualitySection, ranks: ScoreRanks | None) -> Judge:
    """Make the judge of quality by score: records below the threshold go, or those below the best share of the domain;
    neither: all stay."""

    def judge(domain: str, scores: np.ndarray, digests: np.ndarray) -> ScoreDecision:
        if quality.keep_top is not None:
            assert ranks is not None, "scores are counted where a share of them is kept"
            stays = ranks.of(domain, scores, digests) >= 1 - quality.keep_top
            least = f"{ranks.value_at(domain, 1 - quality.keep_top):.5f}, the best {quality.keep_top:g} of {domain}"
            return ScoreDecision(stays, "keep_top", [f"{score:.5f}" for score in scores], [least] * len(scores))
        least_score = 0.0 if quality.threshold is None else quality.threshold
        stays = scores >= least_score - 5e-6  # scores are float32 of numbers with five decimals
        return ScoreDecision(
            stays, "threshold", [f"{score:.5f}" for score in scores], [f"{least_score:g}"] * len(scores)
        )

    return judge


def noise_judge(threshold: float) -> Judge:
    """Make the judge of noise by score: contrasts above the threshold go."""

    def judge(domain: str, scores: np.ndarray, digests: np.ndarray) -> ScoreDecision:
        values = [f"{score:.4f} bits per byte" for score in scores]
        return ScoreDecision(scores <= threshold + 5e-5, "contrast", values, [f"{threshold:g}"] * len(scores))

    return judge


def sample_judge(sample: SampleSection, ranks: ScoreRanks) -> Judge:
    """Make the judge of sampling by score: a record stays with a probability that depends on the rank of its bits per
    byte and on its domain."""

    def judge(domain: str, scores: np.ndarray, digests: np.ndarray) -> ScoreDecision:
        rank = ranks.of(domain, scores, digests)
        chance = chances(rank, sample.weights, sample.shape) * sample.domain_weights.get(domain, 1.0)
        stays = uniform(digests, _DRAW, sample.seed) < chance
        values = [f"{score:.3f} bits per byte" for score in scores]
        return ScoreDecision(stays, "sampled out", values, [f"kept with probability {one:.3g}" for one in chance])

    return judge


def chances(rank: np.ndarray, weights: Sequence[float], shape: str) -> np.ndarray:
    """The probability that sampling keeps a record at each rank in [0, 1), float64.

    Example:
        >>> ranks = np.array([0.0, 0.4, 0.75, 0.999])
        >>> chances(ranks, (1.0, 0.5), "steps").tolist(), chances(ranks, (1.0, 0.5), "smooth").round(3).tolist()
        ([1.0, 1.0, 0.5, 0.5], [1.0, 0.8, 0.625, 0.5])
    """
    values = np.asarray(weights, np.float64)
    if shape == "smooth":
        return np.interp(rank, np.linspace(0, 1, len(values)), values)
    return values[np.minimum((rank * len(values)).astype(np.int64), len(values) - 1)]

"""The noise filter: the contrast of a text between a model of clean text and one of noise, and how well it finds noise.

Contrast is the bits per byte under the model of clean text less those under the model of noise: the difference of cross
entropies by which Moore and Lewis (2010, ACL P10-2041) select text, turned against noise. Above 0 a text is more like
noise. Of the reference, six tenths (by hash) train the models; two give the threshold, so that the share of them that
is lost is the one asked for; on the last two, and on noise made from them, the filter is measured. What it cannot see
is text that repeats itself: rules on repetition do.

A reference that is a sample of the corpus holds the noise that is looked for, above the clean text: of planted noise
little would be found at a quantile of it. The threshold is then that of a normal distribution which has the median and
the lower quartile of the sample (benchmarks/results/data_scores_avx512.json has both).
"""

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.core.errors import DataError
from tilewright.data.common.hashing import hash64
from tilewright.data.engine.build_settings import NoiseSection
from tilewright.data.stages.scores.classifier import LEAST_AUC, auc_error
from tilewright.data.stages.scores.corruptions import KINDS
from tilewright.data.stages.scores.ngram_model import NgramModel, bits_per_byte, train_ngrams
from tilewright.data.stages.scores.reference_texts import Piece

LEAST_TEXTS, FEWEST = 50, 10
"""Clean texts below which a filter is refused, and below which there is none."""
LEAST_FOR_LOSS = 300
"""Clean texts below which `clean_loss` gives no threshold. Two tenths of them, m, give it. At a loss of 0.01 it is the
greatest of m contrasts, which a share of other clean texts exceeds that is 1 / (m + 1) on average and 1 - 0.05^(1/m) in
one of 20 cases, whatever their distribution: 9 and 26 % of 50 texts, 1.6 and 4.9 % of 300."""
GIVEN = "given"
"""Kind of the noise that the user has."""
_TRAIN, _CALIBRATE, _TEST = 0, 1, 2
_PARTS = np.array([_TRAIN] * 6 + [_CALIBRATE] * 2 + [_TEST] * 2)


def contrasts(models: Sequence[NgramModel], texts: Sequence[bytes]) -> np.ndarray:
    """Contrast of each text for the noise filter, float64 [texts], rounded to 0.0001, under (model of clean text, model
    of noise)."""
    clean, noise = bits_per_byte(models, texts)
    return np.round(clean - noise, 4)


def train_contrast(
    clean: Sequence[Piece], noisy: Sequence[Piece], noise: NoiseSection | SimpleNamespace
) -> tuple[list[NgramModel], dict[str, Any]]:
    """Train the contrast: models of clean and noisy text; returns both, and the contrasts of text that they have not
    seen.

    Args:
        clean: clean text.
        noisy: noise; empty: it is made from the clean text.
        noise: settings.

    Returns:
        (models of clean text and of noise, contrasts: `calibrate` and `test` of clean text, `kinds` of noise by kind;
        and `texts`: how many clean texts there were).

    Raises:
        DataError: too few texts.
    """
    parts, noisy_parts = _part_of(clean), _part_of(noisy)
    least = FEWEST if noise.allow_weak else LEAST_TEXTS
    missing = not all((parts == part).any() for part in (_TRAIN, _CALIBRATE, _TEST))
    if len(clean) < least or missing or (noisy and not {_TRAIN, _TEST} <= set(noisy_parts.tolist())):
        raise _too_few(len(clean), least, len(noisy) if noisy else None)
    seen = [piece for piece, part in zip(clean, parts, strict=True) if part == _TRAIN]
    unseen = [piece for piece, part in zip(clean, parts, strict=True) if part == _TEST]
    if noisy:
        bad = [piece.data for piece, part in zip(noisy, noisy_parts, strict=True) if part == _TRAIN]
        kinds = {GIVEN: [piece.data for piece, part in zip(noisy, noisy_parts, strict=True) if part == _TEST]}
    else:
        bad = [_made(piece, noise.kinds[piece.key // 10 % len(noise.kinds)]) for piece in seen]
        kinds = {kind: [_made(piece, kind) for piece in unseen] for kind in noise.kinds}
    models = [train_ngrams(texts, noise.order) for texts in ([piece.data for piece in seen], bad)]
    calibrate = [piece.data for piece, part in zip(clean, parts, strict=True) if part == _CALIBRATE]
    found = {
        "texts": len(clean),
        "calibrate": contrasts(models, calibrate).tolist(),
        "test": contrasts(models, [piece.data for piece in unseen]).tolist(),
        "kinds": {kind: contrasts(models, texts).tolist() for kind, texts in kinds.items()},
    }
    return models, found


def _part_of(pieces: Sequence[Piece]) -> np.ndarray:
    keys = np.array([piece.key for piece in pieces], np.uint64)
    return _PARTS[(hash64(0x5EED, keys) % np.uint64(10)).astype(np.int64)] if len(keys) else np.zeros(0, np.int64)


def _made(piece: Piece, kind: str) -> bytes:
    return KINDS[kind](piece.data.decode(), piece.key + piece.number).encode()


def joined(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The contrasts of several pairs of models as one."""
    kinds = {kind: [value for one in found for value in one["kinds"][kind]] for kind in found[0]["kinds"]}
    values = {name: [value for one in found for value in one[name]] for name in ("calibrate", "test")}
    return values | {"kinds": kinds, "texts": sum(one["texts"] for one in found)}


def verified(
    found: Mapping[str, Any], noise: NoiseSection | SimpleNamespace, of_corpus: bool = False
) -> dict[str, Any]:
    """Verify a threshold of contrast: returns it, and what it does to held-out text.

    Args:
        found: see `train_contrast`.
        noise: settings.
        of_corpus: the clean texts are records of the build, some of which are noise.

    Returns:
        `threshold`; `clean` (held-out clean texts) and `clean_lost` (share of them above it); `of_corpus`;
        `precision`: of what goes where clean text and noise are equally frequent,
        the share that is noise; `auc` and `auc_error`; and `kinds`: by kind of noise the number of texts, `recall` and
        `auc`.

    Raises:
        DataError: the filter is hardly better than chance, or the texts are too few for a threshold.
    """
    # A threshold from few texts would be chance.
    if found["texts"] < LEAST_FOR_LOSS and noise.threshold is None and not noise.allow_weak:
        raise _unsteady(found, _threshold(np.sort(found["calibrate"]), noise, of_corpus))
    clean = np.array(found["test"])
    threshold = _threshold(np.sort(found["calibrate"]), noise, of_corpus)
    # Kinds of noise apart: a filter that finds only the easiest would hide in the mean.
    kinds = {}
    for kind, values in found["kinds"].items():
        bad = np.array(values)
        kinds[kind] = {
            "texts": len(bad),
            "recall": round(float((bad > threshold).mean()), 4),
            "auc": round(area(clean, bad), 4),
        }
    lost = float((clean > threshold).mean())
    # Kinds count alike, however many texts each has.
    recall = float(np.mean([kind["recall"] for kind in kinds.values()]))
    auc = float(np.mean([kind["auc"] for kind in kinds.values()]))
    account = {
        "threshold": round(threshold, 4),
        "clean": len(clean),
        "clean_lost": round(lost, 4),
        "of_corpus": of_corpus,
        "precision": round(recall / (recall + lost), 4) if recall + lost else 0.0,
        "recall": round(recall, 4),
        "auc": round(auc, 4),
        "auc_error": round(auc_error(auc, len(clean), min(kind["texts"] for kind in kinds.values())), 4),
        "kinds": kinds,
    }
    # Two standard errors above the least area: else the filter may be no better than that.
    if auc - 2 * account["auc_error"] < LEAST_AUC and not noise.allow_weak:
        raise _weak(account)
    return account


def _threshold(held: np.ndarray, noise: NoiseSection | SimpleNamespace, of_corpus: bool) -> float:
    """The threshold of contrast above which records go, from the sorted contrasts of held-out text."""
    if noise.threshold is not None:
        return noise.threshold
    if of_corpus:
        median, quartile = np.quantile(held, [0.5, 0.25])
        normal = NormalDist()
        return float(median + (median - quartile) * normal.inv_cdf(1 - noise.clean_loss) / normal.inv_cdf(0.75))
    return float(held[len(held) - 1 - int(noise.clean_loss * len(held))])


def area(low: np.ndarray, high: np.ndarray) -> float:
    """The probability that a contrast of `high` is above one of `low`, ties half: the area under the ROC curve.

    Example:
        >>> area(np.array([1, 2]), np.array([2, 3]))
        0.875
    """
    low = np.sort(low)
    return float((np.searchsorted(low, high) + np.searchsorted(low, high, "right")).mean() / (2 * len(low)))


def _too_few(clean: int, least: int, noisy: int | None) -> DataError:
    return DataError(
        "Too few texts for a noise filter",
        where="[noise]",
        got=f"{clean} clean texts" + ("" if noisy is None else f", {noisy} of noise"),
        need=f"{least} clean texts" + ("" if noisy is None else f", and {FEWEST} of noise"),
        try_="more text, or allow_weak = true" if least == LEAST_TEXTS else "more text",
    )


def _unsteady(found: Mapping[str, Any], threshold: float) -> DataError:
    return DataError(
        "Too few clean texts for the threshold of the noise filter",
        where="noise.clean_loss",
        got=f"{found['texts']} clean texts, of which {len(found['calibrate'])} give the threshold",
        need=f"{LEAST_FOR_LOSS}: of fewer, it may lose much more clean text than was asked for",
        try_=f"more text, threshold = {threshold:.2f} in [noise] (what these texts give), or allow_weak = true",
    )


def _weak(account: Mapping[str, Any]) -> DataError:
    kinds = ", ".join(f"{kind} {one['auc']:.3f}" for kind, one in account["kinds"].items())
    return DataError(
        "Noise filter is hardly better than chance",
        where="[noise]",
        got=f"area under the ROC curve {account['auc']:.3f}, standard error {account['auc_error']:.3f} ({kinds})",
        need=f"{LEAST_AUC} after two standard errors are taken off (chance: 0.5)",
        try_="cleaner or more text in noise.clean, fewer kinds, or allow_weak = true",
    )

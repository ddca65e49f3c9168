"""The quality model: a logistic regression on hashed byte n-grams, with a calibrated score and an honest account.

A text is the frequencies of its grams of 2 to 5 bytes, hashed into 2^18 features, each divided by the root of its mean
frequency: a linear model, as fastText's classifiers are (Joulin et al. 2016, arXiv 1607.01759) with which corpora are
filtered, of grams in place of words, so that any language and code will do. Both labels weigh the same, so a score is
the probability of "good" where both are equally frequent. Five folds by a hash of the text, so that copies are in one
fold, give each example a score by a model that has not seen it; of these are the area under the ROC curve, its standard
error (Hanley and McNeil 1982) and the calibration, which is a logistic curve (Platt 1999). The model itself is trained
on all.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tilewright.core.errors import ConfigError, DataError
from tilewright.data.stages.scores.byte_ngrams import blocks, hashed, inside, spaced, sums

LENGTHS = (2, 3, 4, 5)
"""Bytes of the grams."""
LEAST_EXAMPLES, FEWEST = 50, 10
"""Examples of each label below which a model is refused, and below which there is none."""
LEAST_AUC = 0.6
"""A model is refused whose area under the ROC curve may be less: two standard errors below what was measured."""
_BITS = 18
_UNIT = 1 << 16  # in which weights are whole numbers, so that their sum is exact
_FLOOR = 1e-4  # frequency up to which grams count as equally rare
_COST = 10.0  # inverse of the L2 penalty
_FOLDS, _BINS = 5, 10
_KEY = "tilewright.quality"


@dataclass(frozen=True)
class QualityModel:
    """`weights` int32 [2^18] in units of 1 / 65536; the logit of a text is `slope` times the mean weight of its grams
    plus `shift`. `account`: what was measured, see `train_quality`."""

    weights: np.ndarray
    slope: float
    shift: float
    account: dict[str, Any]

    def scores(self, texts: Sequence[bytes]) -> np.ndarray:
        """Score texts by the quality classifier: probability of "good" for each, float64 [texts], rounded to
        0.00001."""
        logits = self.slope * mean_weights(self.weights, texts) + self.shift
        return np.round(1 / (1 + np.exp(-np.clip(logits, -40, 40))), 5)

    def save(self, path: Path) -> None:
        """Save the quality classifier as safetensors."""
        words = json.dumps({"slope": self.slope, "shift": self.shift, "account": self.account}, sort_keys=True)
        save_file({"weights": self.weights}, path, metadata={_KEY: words})


def load_quality(path: Path) -> QualityModel:
    """Load a quality classifier that `QualityModel.save` wrote.

    Raises:
        DataError: the file is none.
    """
    try:
        with safe_open(path, "np") as file:
            words = json.loads((file.metadata() or {})[_KEY])
            weights = file.get_tensor("weights")
        if weights.shape != (1 << _BITS,) or weights.dtype != np.int32:
            raise ValueError(f"weights of {weights.shape}, {weights.dtype}")
        return QualityModel(weights, float(words["slope"]), float(words["shift"]), dict(words["account"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "Quality model cannot be read",
            where=str(path),
            got=f"{type(error).__name__}: {error}",
            need="quality.safetensors of a data build",
            try_="work/quality_model/00000/quality.safetensors in the folder of a build with examples",
        ) from None


def mean_weights(weights: np.ndarray, texts: Sequence[bytes]) -> np.ndarray:
    """The quality classifier's mean of int32 `weights` over the grams of each text, in units of 1, float64 [texts]; 0
    for an empty one."""
    if not texts:
        return np.zeros(0)
    data, gaps, sizes = spaced(texts)
    total = np.zeros(len(data), np.int32)
    for first, last in blocks(data):
        found = total[first : first + len(last) - 1]
        for length in LENGTHS:
            found += weights[_feature(hashed(last[1:], length))]
    total[~inside(data, gaps)] = 0
    return sums(total, gaps) / (_UNIT * len(LENGTHS) * np.maximum(sizes, 1))


def _feature(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> np.uint64(64 - _BITS)).view(np.int64)


def frequencies(texts: Sequence[bytes]) -> Any:
    """The relative frequencies of the quality classifier's features in each text, a scipy CSR matrix float32 [texts,
    2^18]; rows sum to 1."""
    from scipy.sparse import csr_array

    columns, values, ends = [], [], [0]
    for text in texts:
        data, _, _ = spaced([text])
        last = np.concatenate([part[1:] for _, part in blocks(data)])
        found = np.concatenate([_feature(hashed(last, length)) for length in LENGTHS])
        column, count = np.unique(found, return_counts=True)
        columns.append(column.astype(np.int32))
        values.append((count / len(found)).astype(np.float32))
        ends.append(ends[-1] + len(column))
    return csr_array((np.concatenate(values), np.concatenate(columns), ends), shape=(len(texts), 1 << _BITS))


def train_quality(
    texts: Sequence[bytes], is_good: np.ndarray, fold_keys: np.ndarray, *, allow_weak: bool
) -> QualityModel:
    """Train the quality classifier from examples.

    Args:
        texts: UTF-8, none empty.
        is_good: bool [texts].
        fold_keys: uint64 [texts]; equal ones are in one fold.
        allow_weak: take a model that would be refused.

    Returns:
        A model whose `account` has `good` and `bad` (examples), `auc`, `auc_error`, `brier` (mean squared error of the
        score) and `calibration`: (mean score, share that is good, examples) of ten equal parts of the range of scores.

    Raises:
        ConfigError: scikit-learn is not installed.
        DataError: too few examples, or a model that is hardly better than chance.
    """
    learn, area = _sklearn()
    good, bad = int(is_good.sum()), int((~is_good).sum())
    least = FEWEST if allow_weak else LEAST_EXAMPLES
    folds = (fold_keys % np.uint64(_FOLDS)).astype(np.int64)
    parts = [bool(is_good[folds != k].any() and (~is_good)[folds != k].any()) for k in range(_FOLDS)]
    if min(good, bad) < least or not all(parts):
        raise _too_few(good, bad, least, allow_weak=allow_weak)
    features = frequencies(texts)
    mean = np.asarray(features.mean(0), np.float64).ravel()
    active = np.flatnonzero(mean)
    scale = 1 / np.sqrt(mean[active] + _FLOOR)
    scaled = features[:, active].astype(np.float64).multiply(scale).tocsr()
    raw = np.zeros(len(texts))
    for k in range(_FOLDS):
        seen, unseen = folds != k, folds == k
        if unseen.any():
            weights, shift = learn(scaled[seen], is_good[seen])
            raw[unseen] = scaled[unseen] @ weights + shift
    scores = np.zeros(len(texts))
    for k in range(_FOLDS):  # each fold is calibrated by the others
        seen, unseen = folds != k, folds == k
        slope, shift = _platt(raw[seen], is_good[seen])
        scores[unseen] = 1 / (1 + np.exp(-np.clip(slope * raw[unseen] + shift, -40, 40)))
    auc = float(area(is_good, raw))
    account = {"good": good, "bad": bad, "auc": round(auc, 4), "auc_error": round(auc_error(auc, good, bad), 4)}
    account |= calibration(scores, is_good)
    if auc - 2 * account["auc_error"] < LEAST_AUC and not allow_weak:
        raise _weak(account)
    weights, shift = learn(scaled, is_good)
    slope, moved = _platt(raw, is_good)
    unit = _largest(weights * scale)
    whole = np.zeros(1 << _BITS, np.int32)
    whole[active] = np.rint(weights * scale * (_UNIT / unit))
    return QualityModel(whole, slope * unit, slope * shift + moved, account)


def _largest(weights: np.ndarray) -> float:
    """The largest power of two by which the classifier's weights are divided so that they use the range of whole
    numbers."""
    most = float(np.abs(weights).max())
    return 2.0 ** np.ceil(np.log2(most / 1024)) if most else 1.0


def _sklearn() -> tuple[Any, Any]:
    """The classifier by scikit-learn: (learn, area under the ROC curve). Learning runs in one thread, so that it gives
    the same bits everywhere."""
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.metrics import roc_auc_score
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ConfigError(
            "Quality model without the library that trains it",
            where="[quality]",
            got=str(error),
            need="scikit-learn, or a model that was trained before",
            try_='pip install scikit-learn, or model = "quality.safetensors"',
        ) from error

    def learn(features: Any, is_good: np.ndarray) -> tuple[np.ndarray, float]:
        with threadpool_limits(1):
            model = LogisticRegression(C=_COST, class_weight="balanced", max_iter=1000).fit(features, is_good)
        return model.coef_[0], float(model.intercept_[0])

    return learn, roc_auc_score


def _platt(logits: np.ndarray, is_good: np.ndarray) -> tuple[float, float]:
    """Platt's calibration of the classifier: (slope, shift) of the logistic curve that fits labels to logits best, both
    labels of equal weight.

    Platt's targets, which are not quite 0 and 1, keep the slope finite where the labels are separable.
    """
    from scipy.optimize import minimize

    good, bad = int(is_good.sum()), int((~is_good).sum())
    target = np.where(is_good, (good + 1) / (good + 2), 1 / (bad + 2))
    weight = np.where(is_good, 0.5 / good, 0.5 / bad)

    def loss(at: np.ndarray) -> tuple[float, np.ndarray]:
        z = at[0] * logits + at[1]
        off = weight * (1 / (1 + np.exp(-np.clip(z, -40, 40))) - target)
        value = float((weight * (np.logaddexp(0, z) - target * z)).sum())
        return value, np.array([(off * logits).sum(), off.sum()])

    found = minimize(loss, np.array([1.0, 0.0]), jac=True, method="BFGS").x
    return float(found[0]), float(found[1])


def auc_error(auc: float, good: int, bad: int) -> float:
    """Standard error of the classifier's area under the ROC curve (Hanley and McNeil 1982).

    Example:
        >>> round(auc_error(0.5, 50, 50), 3), round(auc_error(0.95, 200, 200), 3)
        (0.058, 0.011)
    """
    one, two = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    spread = auc * (1 - auc) + (good - 1) * (one - auc**2) + (bad - 1) * (two - auc**2)
    return float(np.sqrt(max(spread, 0) / (good * bad)))


def calibration(scores: np.ndarray, is_good: np.ndarray) -> dict[str, Any]:
    """Calibration of the classifier: `brier` and `calibration` of an account; both labels weigh the same."""
    weight = np.where(is_good, 0.5 / max(1, int(is_good.sum())), 0.5 / max(1, int((~is_good).sum())))
    bins = np.minimum((scores * _BINS).astype(np.int64), _BINS - 1)
    rows = []
    for k in range(_BINS):
        here = bins == k
        if here.any():
            total = float(weight[here].sum())
            means = (weight[here] * scores[here]).sum() / total, (weight[here] * is_good[here]).sum() / total
            rows.append([*(round(float(mean), 4) for mean in means), int(here.sum())])
    return {"brier": round(float((weight * (scores - is_good) ** 2).sum()), 4), "calibration": rows}


def _too_few(good: int, bad: int, least: int, *, allow_weak: bool) -> DataError:
    return DataError(
        "Too few examples for a quality model",
        where="[quality]",
        got=f"{good} good and {bad} bad texts, no text twice",
        need=f"{least} of each",
        try_="more examples" if allow_weak else "more examples, or allow_weak = true",
    )


def _weak(account: dict[str, Any]) -> DataError:
    return DataError(
        "Quality model is hardly better than chance",
        where="[quality]",
        got=f"area under the ROC curve {account['auc']:.3f}, standard error {account['auc_error']:.3f}, on examples "
        f"that it was not trained on ({account['good']} good, {account['bad']} bad)",
        need=f"{LEAST_AUC} after two standard errors are taken off (chance: 0.5)",
        try_="more examples, or such whose difference is in their wording; or allow_weak = true",
    )

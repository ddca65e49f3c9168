"""Measurements of the models of a build's scores, and the distribution of the scores, for its page."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.core.units import format_bytes
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.unit_folders import Units
from tilewright.data.stages.scores.fit_models import ACCOUNT, noise_threshold
from tilewright.data.stages.scores.keep_by_score import BITS, CONTRAST, QUALITY, ScoreKind, ScoreRanks


@dataclass(frozen=True)
class ScoreModel:
    """A model: `line` is what is said of it on the screen; `facts` and a table are for the page."""

    name: str
    line: str
    facts: list[tuple[str, str]]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def score_models(units: Units) -> list[ScoreModel]:
    """The models of scores that the finished units of a build hold."""
    makers = (("quality_model", _quality), ("noise_threshold", _noise), ("sample_model", _sample))
    found = []
    for stage, make in makers:
        path = units.folder(stage, 0) / ACCOUNT
        if path.is_file():
            found.append(make(json.loads(path.read_bytes())))
    return found


def _quality(account: dict[str, Any]) -> ScoreModel:
    area = f"{account['auc']:.3f} ± {account['auc_error']:.3f}"
    examples = f"{account['good']:,} good and {account['bad']:,} bad examples"
    facts = [
        ("examples", examples),
        ("area under the ROC curve", f"{area}; each example scored by a model of the other four folds"),
        ("mean squared error of the score", f"{account['brier']:.4f} (0.25: always 0.5)"),
    ]
    if account.get("both_ways"):
        facts.append(("left out", f"{account['both_ways']:,} texts that are both good and bad"))
    rows = tuple((f"{score:.3f}", f"{good:.3f}", f"{num:,}") for score, good, num in account["calibration"])
    line = f"quality model: area under the ROC curve {area} on held-out folds of {examples}"
    return ScoreModel("Quality model", line, facts, ("mean score", "share that is good", "examples"), rows)


def _noise(account: dict[str, Any]) -> ScoreModel:
    of = "records, some of which are noise" if account["of_corpus"] else "clean texts"
    lost = f"{100 * account['clean_lost']:.1f} % of {account['clean']:,} held-out {of}"
    facts = [
        ("threshold", f"{account['threshold']:.4f} bits per byte"),
        ("lost", lost),
        ("recall", f"{100 * account['recall']:.1f} %, mean of the kinds of noise"),
        ("area under the ROC curve", f"{account['auc']:.3f} ± {account['auc_error']:.3f}"),
    ]
    if not account["of_corpus"]:
        share = f"{100 * account['precision']:.1f} % where clean text and noise are equally frequent"
        facts.insert(3, ("precision", share))
    rows = tuple(
        (kind, f"{one['texts']:,}", f"{100 * one['recall']:.1f} %", f"{one['auc']:.3f}")
        for kind, one in account["kinds"].items()
    )
    found = ", ".join(f"{kind} {100 * one['recall']:.0f} %" for kind, one in account["kinds"].items())
    line = f"noise filter: finds {found} of held-out noise, loses {lost}"
    return ScoreModel("Noise filter", line, facts, ("noise", "texts", "found", "area under the ROC curve"), rows)


def _sample(account: dict[str, Any]) -> ScoreModel:
    text = f"{account['texts']:,} texts, {format_bytes(account['bytes'])}"
    facts = [("reference", text), ("order", f"{account['order']} bytes")]
    if account["models"] == 2:
        facts.append(("records", "each is scored by the model of the half of the corpus that it is not in"))
    return ScoreModel("Model to sample by", f"sampled by an n-gram model of {text}", facts)


def score_histograms(units: Units) -> Iterator[tuple[ScoreKind, Path]]:
    """Histograms of scores: (kind of score, folder of a shard with `histograms.json`)."""
    for kind in (QUALITY, CONTRAST, BITS):
        for folder in sorted((units.root / kind.stage).glob("[0-9]" * 5)):
            yield kind, folder


def score_limits(units: Units, settings: DataBuild, domain: str, measure: str) -> dict[str, float]:
    """Limits of scores: the numbers by which records of a domain were dropped or sampled."""
    if measure == QUALITY.column and settings.quality.keep_top is not None:
        ranks = ScoreRanks.load(units.folder("quality_counts", 0))
        return {"keep_top": ranks.value_at(domain, 1 - settings.quality.keep_top)}
    if measure == QUALITY.column:
        return {} if settings.quality.threshold is None else {"threshold": settings.quality.threshold}
    if measure == CONTRAST.column:
        return {"threshold": noise_threshold(units.folder("noise_threshold", 0))}
    ranks = ScoreRanks.load(units.folder("sample_counts", 0))
    num = len(settings.sample.weights)
    if settings.sample.shape == "smooth":
        points = enumerate(settings.sample.weights)
        return {f"weight {weight:g}": ranks.value_at(domain, k / max(1, num - 1)) for k, weight in points}
    return {f"bucket {k + 1}": ranks.value_at(domain, k / num) for k in range(1, num)}

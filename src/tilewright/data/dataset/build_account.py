"""The account of a finished build, from its files alone: stages, domains, reasons with examples, histograms of
measures.

The page of a build is made of this; so is what `tilewright data build` prints.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.data.dataset.open_built import read_dataset
from tilewright.data.dataset.score_models import ScoreModel, score_histograms, score_limits, score_models
from tilewright.data.engine.build_context import WORK
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.record_tables import rows
from tilewright.data.engine.unit_folders import Units
from tilewright.data.stages.all_stages import STAGES
from tilewright.data.stages.text.apply_rules import bin_starts, thresholds

MODALITIES = ("text", "image", "audio")
NO_DOMAIN = "(in no domain)"
"""What was refused where a folder begins belongs to none."""
_EXAMPLES = 3


@dataclass
class StageCount:
    """The account of one stage of a build: units, seconds over all of them, and sums of what they counted."""

    name: str
    says: str
    units: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Reason:
    """Records or files of a domain that were dropped by one rule, with a few examples of them."""

    stage: str
    rule: str
    domain: str
    threshold: str
    count: int = 0
    num_bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class MeasureHistogram:
    """How a measure is distributed over the records of a domain, and the thresholds of the rules that look at it."""

    domain: str
    measure: str
    starts: list[float]
    counts: list[int]
    thresholds: dict[str, float]


@dataclass(frozen=True)
class BuildAccount:
    """The account of a finished build, and `summary` as training has it."""

    folder: Path
    summary: dict[str, Any]
    settings: DataBuild
    stages: list[StageCount]
    reasons: list[Reason]
    histograms: list[MeasureHistogram]
    models: list[ScoreModel]


def build_account(folder: Path) -> BuildAccount:
    """Read the account of a finished build.

    Raises:
        DataError: `folder` holds none.
    """
    content = read_dataset(folder)
    settings = DataBuild.model_validate(content["settings"])
    units = Units(folder / WORK)
    stages = [_stage(units, stage.name, stage.says) for stage in STAGES]
    return BuildAccount(
        folder,
        content["summary"],
        settings,
        [stage for stage in stages if stage.units],
        reasons_of(folder),
        [*_histograms(units, settings), *_score_histograms(units, settings)],
        score_models(units),
    )


def _indices(units: Units, stage: str) -> list[int]:
    return sorted(int(one.name) for one in (units.root / stage).glob("*") if one.name.isdecimal())


def _stage(units: Units, name: str, says: str) -> StageCount:
    found = StageCount(name, says)
    for index in _indices(units, name):
        receipt = units.receipt(name, index)
        if receipt is None:
            continue
        found.units += 1
        found.seconds += receipt["seconds"]
        for count, value in receipt["counts"].items():
            if isinstance(value, int):
                found.counts[count] = found.counts.get(count, 0) + value
    return found


def reasons_of(folder: Path) -> list[Reason]:
    """Account of rejects of a finished build by stage, rule and domain, the most bytes first."""
    found: dict[tuple[str, str, str], Reason] = {}
    for file in sorted((folder / "rejects").glob("*.parquet")):
        for row in rows(file):
            key = row["stage"], row["rule"], row["domain"]
            reason = found.setdefault(key, Reason(*key, row["threshold"]))
            reason.count += row["count"]
            reason.num_bytes += row["num_bytes"]
            if len(reason.examples) < _EXAMPLES:
                reason.examples.append(row)
    return sorted(found.values(), key=lambda r: (-r.num_bytes, -r.count, r.stage, r.rule, r.domain))


def _histograms(units: Units, settings: DataBuild) -> Iterator[MeasureHistogram]:
    sums: dict[str, np.ndarray] = {}
    for index in _indices(units, "rules"):
        for key, counts in json.loads((units.folder("rules", index) / "histograms.json").read_bytes()).items():
            sums[key] = sums.get(key, 0) + np.array(counts, np.int64)
    for key, counts in sorted(sums.items()):
        domain, _, measure = key.partition("\0")
        limits = {rule.name: rule.value for rule in thresholds(settings.rules) if rule.measure == measure}
        yield MeasureHistogram(domain, measure, bin_starts(measure), counts.tolist(), limits)


def _score_histograms(units: Units, settings: DataBuild) -> Iterator[MeasureHistogram]:
    sums: dict[tuple[str, str], np.ndarray] = {}
    starts: dict[str, list[float]] = {}
    for kind, folder in score_histograms(units):
        starts[kind.column] = kind.bin_starts
        for key, counts in json.loads((folder / "histograms.json").read_bytes()).items():
            domain, _, measure = key.partition("\0")
            sums[measure, domain] = sums.get((measure, domain), 0) + np.array(counts, np.int64)
    for (measure, domain), counts in sorted(sums.items()):
        limits = score_limits(units, settings, domain, measure)
        yield MeasureHistogram(domain, measure, starts[measure], counts.tolist(), limits)

"""The stages that score records: for each score a model, the scores, their counts, and what stays.

A stage that is off has no units, and what comes after it reads what came before it (`stages.stage_order`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tilewright.core.atomic_io import hash_file
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import Item, Listing
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import (
    Every,
    FoundValue,
    Only,
    Same,
    StageInput,
    StageName,
    named,
    one_unit,
    per_shard,
)
from tilewright.data.stages.scores import fit_models, keep_by_score
from tilewright.data.stages.scores.reference_texts import READING
from tilewright.data.stages.scores.score_decisions import noise_judge, quality_judge, sample_judge
from tilewright.data.stages.scores.score_settings import CORPUS
from tilewright.data.stages.stage_order import before_noise, before_quality

Count = Callable[[Context], int]


@dataclass(frozen=True)
class References(StageInput):
    """The references that a model is learned from: the files of folders, or one file; not the corpus."""

    settings: tuple[str, ...]

    def identity(self, c: Context, i: int) -> object:
        found: list[Any] = []
        for setting, path in self._given(c):
            listing = c.references.get(setting)
            if listing is not None:
                found.append([setting, *(listing.keys(shard) for shard in range(len(listing.shards)))])
            else:
                found.append([setting, hash_file(Path(path)) if path and path != CORPUS else path])
        return found

    def value(self, c: Context, i: int) -> fit_models.References:
        found: dict[str, Listing | Path] = {}
        for setting, path in self._given(c):
            listing = c.references.get(setting)
            if listing is not None:
                readable = [[item for item in shard if not c.is_set_aside(item)] for shard in listing.shards]
                found[setting] = replace(listing, shards=readable)
            elif path and path != CORPUS:
                found[setting] = Path(path)
        return found

    def files(self, c: Context, i: int) -> list[Item]:
        listings = [c.references[setting] for setting in self.settings if setting in c.references]
        return [item for listing in listings for shard in listing.shards for item in shard]

    def _given(self, c: Context) -> list[tuple[str, str]]:
        sections = (setting.split(".") for setting in self.settings)
        return [(f"{section}.{name}", getattr(getattr(c.build, section), name)) for section, name in sections]


@dataclass(frozen=True)
class CorpusSample(StageInput):
    """The records that a sample of the corpus is taken of, where the setting `reference` of a section asks for one."""

    section: str
    reference: str
    stage: StageName
    """The one whose records they are."""

    def identity(self, c: Context, i: int) -> object:
        if not self._is_asked(c):
            return None
        domains = getattr(c.build, self.section).domains
        return [c.every(named(self.stage, c)), c.every("repair"), c.listing.domains(), domains]

    def value(self, c: Context, i: int) -> fit_models.CorpusRecords:
        if not self._is_asked(c):
            return None
        domains, stage = getattr(c.build, self.section).domains, named(self.stage, c)
        wanted = [i for i, domain in enumerate(c.listing.domains()) if not domains or domain in domains]
        return [c.folder("repair", i) for i in wanted], [c.folder(stage, i) for i in wanted]

    def _is_asked(self, c: Context) -> bool:
        return getattr(getattr(c.build, self.section), self.reference) == CORPUS


def _units(section: str, num: Count) -> Count:
    """Units of a score's stage that is there where its section is on."""
    return lambda c: num(c) if getattr(c.build, section).is_on else 0


def _counted(c: Context) -> int:
    return int(c.build.quality.is_on and c.build.quality.keep_top is not None)


def _domains(c: Context, i: int) -> list[str]:
    return c.listing.domains()


def _score(
    load: Callable[[Path], keep_by_score.Scorer],
    section: str,
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Path,
    kept: Path,
    model: Path,
) -> Mapping[str, Any]:
    return keep_by_score.score_records(records, kept, load(model), getattr(settings, section).domains, folder)


def _scores(
    section: str, says: str, before: StageName, load: Callable[[Path], keep_by_score.Scorer], model: str
) -> BuildStage:
    """The stage that scores the records which stay after the stage `before`, by the model of the stage `model`."""
    inputs = {"records": Same("repair"), "kept": Same(before), "model": Only(model)}
    run = partial(_score, load, section)
    return BuildStage(f"{section}_scores", says, 1, _units(section, per_shard), run, (f"{section}.domains",), inputs)


def _count(
    index: int, settings: SimpleNamespace, folder: Path, *, scores: Sequence[Path], domains: list[str]
) -> Mapping[str, Any]:
    return keep_by_score.count_scores(list(zip(domains, scores, strict=True)), folder)


def _counts(section: str, says: str, units: Count) -> BuildStage:
    inputs = {"scores": Every(f"{section}_scores"), "domains": FoundValue(_domains)}
    return BuildStage(f"{section}_counts", says, 1, units, _count, (), inputs)


def _choose_quality(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Path,
    kept: Path,
    scores: Path,
    counts: Sequence[Path],
) -> Mapping[str, Any]:
    ranks = keep_by_score.ScoreRanks.load(counts[0]) if len(counts) else None
    judge = quality_judge(settings.quality, ranks)
    return keep_by_score.choose_records(records, kept, scores, keep_by_score.QUALITY, judge, folder)


def _choose_noise(
    index: int, settings: SimpleNamespace, folder: Path, *, records: Path, kept: Path, scores: Path, threshold: float
) -> Mapping[str, Any]:
    return keep_by_score.choose_records(records, kept, scores, keep_by_score.CONTRAST, noise_judge(threshold), folder)


def _choose_sample(
    index: int, settings: SimpleNamespace, folder: Path, *, records: Path, kept: Path, scores: Path, counts: Path
) -> Mapping[str, Any]:
    judge = sample_judge(settings.sample, keep_by_score.ScoreRanks.load(counts))
    return keep_by_score.choose_records(records, kept, scores, keep_by_score.BITS, judge, folder)


def _chosen(section: str, before: StageName) -> dict[str, StageInput]:
    """The inputs of each stage that chooses by a score."""
    return {"records": Same("repair"), "kept": Same(before), "scores": Same(f"{section}_scores")}


def _threshold(c: Context, i: int) -> float:
    return fit_models.noise_threshold(c.folder("noise_threshold"))


QUALITY_AND_NOISE = (
    BuildStage(
        *("quality_model", "training the quality model", 1, _units("quality", one_unit), fit_models.make_quality),
        ("quality.example_bytes", "quality.allow_weak", *READING),
        {"references": References(tuple(f"quality.{name}" for name in ("good", "bad", "labelled", "model")))},
    ),
    _scores("quality", "scoring quality", before_quality, fit_models.quality_scorer, "quality_model"),
    _counts("quality", "counting quality scores", _counted),
    BuildStage(
        *("quality", "dropping by quality", 1, _units("quality", per_shard), _choose_quality),
        ("quality.threshold", "quality.keep_top"),
        _chosen("quality", before_quality) | {"counts": Every("quality_counts", _counted)},
    ),
    BuildStage(
        *("noise_models", "training the noise filter", 2, _units("noise", one_unit), fit_models.make_noise),
        (*(f"noise.{name}" for name in ("kinds", "order", "reference_bytes", "allow_weak")), *READING),
        {
            "references": References(("noise.clean", "noise.noisy")),
            "corpus": CorpusSample("noise", "clean", before_noise),
        },
    ),
    BuildStage(
        *("noise_threshold", "measuring the noise filter", 2, _units("noise", one_unit), fit_models.verify_noise),
        ("noise.clean_loss", "noise.threshold", "noise.allow_weak"),
        {"models": Only("noise_models"), "of_corpus": FoundValue(lambda c, i: c.build.noise.clean == CORPUS)},
    ),
    _scores("noise", "scoring noise", before_noise, fit_models.contrast_scorer, "noise_models"),
    BuildStage(
        *("noise", "dropping noise", 1, _units("noise", per_shard), _choose_noise),
        inputs=_chosen("noise", before_noise) | {"threshold": FoundValue(_threshold)},
    ),
)
"""Between the rules and the search for copies."""

SAMPLE = (
    BuildStage(
        *("sample_model", "training the model to sample by", 1, _units("sample", one_unit), fit_models.make_reference),
        ("sample.order", "sample.reference_bytes", *READING),
        {
            "references": References(("sample.reference",)),
            "corpus": CorpusSample("sample", "reference", "unique"),
        },
    ),
    _scores("sample", "measuring bits per byte", "unique", fit_models.bits_scorer, "sample_model"),
    _counts("sample", "counting bits per byte", _units("sample", one_unit)),
    BuildStage(
        *("sample", "sampling", 1, _units("sample", per_shard), _choose_sample),
        tuple(f"sample.{name}" for name in ("weights", "shape", "domain_weights", "seed")),
        _chosen("sample", "unique") | {"counts": Only("sample_counts")},
    ),
)
"""After the search for copies."""

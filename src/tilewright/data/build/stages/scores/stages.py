"""The stages that score records, as `plan` has them: for each score a model, scores, their counts, and what stays.

A stage that is off has no units, and what comes after it reads what came before it: `before_copies` and `last_kept`
name the stages whose side tables the search for copies and the split start from.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright.data.build.context import BuildStage, Context
from tilewright.data.build.stages.scores import choose, models
from tilewright.data.build.stages.scores.judges import noise_judge, quality_judge, sample_judge
from tilewright.data.build.stages.scores.references import Piece, corpus_sample
from tilewright.data.build.stages.scores.settings import CORPUS
from tilewright.data.common.cache import file_digest

Count = Callable[[Context], int]


def _before_noise(c: Context) -> str:
    return "quality" if c.build.quality.is_on else "rules"


def before_copies(c: Context) -> str:
    """The stage whose records the search for copies begins with."""
    return "noise" if c.build.noise.is_on else _before_noise(c)


def last_kept(c: Context) -> str:
    """The stage whose records are the dataset's."""
    return "sample" if c.build.sample.is_on else "unique"


def _units(section: str, num: Callable[[Context], int]) -> Count:
    """Units of a stage that is there where its section is on."""
    return lambda c: num(c) if getattr(c.build, section).is_on else 0


def _shards(c: Context) -> int:
    return c.num_shards


def _one(c: Context) -> int:
    return 1


def _counted(c: Context) -> int:
    return int(c.build.quality.is_on and c.build.quality.keep_top is not None)


def _keys(c: Context, *settings: str) -> list[Any]:
    """What identifies the content of references."""
    found: list[Any] = []
    for setting in settings:
        section, _, name = setting.partition(".")
        path = getattr(getattr(c.build, section), name)
        listing = c.references.get(setting)
        if listing is not None:
            found.append([setting, *(listing.keys(shard) for shard in range(len(listing.shards)))])
        elif path and path != CORPUS:
            found.append([setting, file_digest(Path(path))])
        else:
            found.append([setting, path])
    sections = (c.build.limits, c.build.media, c.build.repair)
    return [*found, c.build.read.text_field, c.build.read.max_chars, *(section.model_dump() for section in sections)]


def _halves(c: Context, stage: str, domains: tuple[str, ...], limit: int) -> tuple[list[Piece], list[Piece]]:
    """A sample of each half of the records that stay after `stage`."""
    shards = [i for i, domain in enumerate(c.listing.domains()) if not domains or domain in domains]
    return corpus_sample([c.folder("repair", i) for i in shards], [c.folder(stage, i) for i in shards], limit)


def _corpus(c: Context, reference: str, stage: str) -> list[object]:
    """Hashes of the records that a sample of the corpus is taken of, with their domains; nothing where none is."""
    return [c.every(stage), c.every("repair"), c.listing.domains()] if reference == CORPUS else []


def _quality_model(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    return models.make_quality(c.build, c.readable_references, folder)


def _noise_models(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    def halves() -> tuple[list[Piece], list[Piece]]:
        return _halves(c, _before_noise(c), c.build.noise.domains, c.build.noise.reference_bytes)

    return models.make_noise(c.build, c.readable_references, halves, folder)


def _sample_model(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
    def halves() -> tuple[list[Piece], list[Piece]]:
        return _halves(c, "unique", c.build.sample.domains, c.build.sample.reference_bytes)

    return models.make_reference(c.build, c.readable_references, halves, folder)


def _scores(
    section: str, says: str, before: Callable[[Context], str], load: Callable[[Path], choose.Scorer], model: str
) -> BuildStage:
    """The stage that scores the records which stay after the stage `before`, by the model of the stage `model`."""

    def reads(c: Context, i: int) -> list[Any]:
        domains = getattr(c.build, section).domains
        return [c.one("repair", i), c.one(before(c), i), c.one(model), domains]

    def run(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
        where = c.folder("repair", i), c.folder(before(c), i)
        return choose.score_records(*where, load(c.folder(model)), getattr(c.build, section).domains, folder)

    return BuildStage(f"{section}_scores", says, 1, _units(section, _shards), reads, run)


def _count(scores: str) -> Callable[[Context, int, Path], Mapping[str, Any]]:
    def run(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
        domains = c.listing.domains()
        return choose.count_scores(list(zip(domains, c.folders(scores), strict=True)), folder)

    return run


def _choose(
    kind: choose.ScoreKind, before: Callable[[Context], str], scores: str, judge: Callable[[Context], choose.Judge]
) -> Callable[[Context, int, Path], Mapping[str, Any]]:
    def run(c: Context, i: int, folder: Path) -> Mapping[str, Any]:
        where = c.folder("repair", i), c.folder(before(c), i), c.folder(scores, i)
        return choose.choose_records(*where, kind, judge(c), folder)

    return run


def _quality_judge(c: Context) -> choose.Judge:
    return quality_judge(c.build.quality, choose.ScoreRanks.load(c.folder("quality_counts")) if _counted(c) else None)


QUALITY_AND_NOISE = (
    BuildStage(
        *("quality_model", "training the quality model", 1, _units("quality", _one)),
        lambda c, i: [
            _keys(c, *(f"quality.{name}" for name in ("good", "bad", "labelled", "model"))),
            *(c.build.quality.example_bytes, c.build.quality.allow_weak),
        ],
        _quality_model,
        ("quality.good", "quality.bad"),
    ),
    _scores("quality", "scoring quality", lambda c: "rules", models.quality_scorer, "quality_model"),
    BuildStage(
        *("quality_counts", "counting quality scores", 1, _counted),
        lambda c, i: [c.every("quality_scores"), c.listing.domains()],
        _count("quality_scores"),
    ),
    BuildStage(
        *("quality", "dropping by quality", 1, _units("quality", _shards)),
        lambda c, i: [
            *(c.one("repair", i), c.one("rules", i), c.one("quality_scores", i)),
            *(c.every("quality_counts", _counted(c)), c.build.quality.threshold, c.build.quality.keep_top),
        ],
        _choose(choose.QUALITY, lambda c: "rules", "quality_scores", _quality_judge),
    ),
    BuildStage(
        *("noise_models", "training the noise filter", 2, _units("noise", _one)),
        lambda c, i: [
            *(_keys(c, "noise.clean", "noise.noisy"), _corpus(c, c.build.noise.clean, _before_noise(c))),
            c.build.noise.model_dump(include={"kinds", "order", "reference_bytes", "allow_weak"}),
            c.build.noise.domains if c.build.noise.clean == CORPUS else (),
        ],
        _noise_models,
        ("noise.clean", "noise.noisy"),
    ),
    BuildStage(
        *("noise_threshold", "measuring the noise filter", 2, _units("noise", _one)),
        lambda c, i: [
            *(c.one("noise_models"), c.build.noise.clean == CORPUS),
            c.build.noise.model_dump(include={"clean_loss", "threshold", "allow_weak"}),
        ],
        lambda c, i, folder: models.verify_noise(c.build, c.folder("noise_models"), folder),
    ),
    _scores("noise", "scoring noise", _before_noise, models.contrast_scorer, "noise_models"),
    BuildStage(
        *("noise", "dropping noise", 1, _units("noise", _shards)),
        lambda c, i: [
            *(c.one("repair", i), c.one(_before_noise(c), i), c.one("noise_scores", i)),
            models.noise_threshold(c.folder("noise_threshold")),
        ],
        _choose(
            *(choose.CONTRAST, _before_noise, "noise_scores"),
            lambda c: noise_judge(models.noise_threshold(c.folder("noise_threshold"))),
        ),
    ),
)
"""Between the rules and the search for copies."""

SAMPLE = (
    BuildStage(
        *("sample_model", "training the model to sample by", 1, _units("sample", _one)),
        lambda c, i: [
            *(_keys(c, "sample.reference"), _corpus(c, c.build.sample.reference, "unique")),
            *(c.build.sample.order, c.build.sample.reference_bytes),
            c.build.sample.domains if c.build.sample.reference == CORPUS else (),
        ],
        _sample_model,
        ("sample.reference",),
    ),
    _scores("sample", "measuring bits per byte", lambda c: "unique", models.bits_scorer, "sample_model"),
    BuildStage(
        *("sample_counts", "counting bits per byte", 1, _units("sample", _one)),
        lambda c, i: [c.every("sample_scores"), c.listing.domains()],
        _count("sample_scores"),
    ),
    BuildStage(
        *("sample", "sampling", 1, _units("sample", _shards)),
        lambda c, i: [
            *(c.one("repair", i), c.one("unique", i), c.one("sample_scores", i), c.one("sample_counts")),
            c.build.sample.model_dump(include={"weights", "shape", "domain_weights", "seed"}),
        ],
        _choose(
            *(choose.BITS, lambda c: "unique", "sample_scores"),
            lambda c: sample_judge(c.build.sample, choose.ScoreRanks.load(c.folder("sample_counts"))),
        ),
    ),
)
"""After the search for copies."""

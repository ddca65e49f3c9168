"""Settings of the stages that score records: `[quality]`, `[noise]` and `[sample]` of a data.toml.

Cited: CCNet is Wenzek et al. 2020 (arXiv 1911.00359), Moore-Lewis is Moore and Lewis 2010 (ACL P10-2041).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tilewright.core.config.section import Bytes, Section
from tilewright.core.errors import Problem

CORPUS = "corpus"
"""A reference that is a sample of the build's own records."""

Kind = Literal["shuffled", "ocr", "boilerplate", "encoded", "symbols"]


class QualitySection(Section):
    good: str = ""
    """Texts that are wanted: a folder of files of any kind that a build reads, or one file. With `bad` it turns the
    stage on: a classifier learns from both, and scores each record from 0 (bad) to 1 (good)."""
    bad: str = ""
    """Texts that are not wanted."""
    labelled: str = ""
    """In place of `good` and `bad`: a .jsonl file whose rows have `read.text_field` and a `label`, good or bad."""
    model: str = ""
    """In place of examples: the quality.safetensors that an earlier build learned."""
    domains: tuple[str, ...] = ()
    """Score records of these domains; others stay. Empty: all."""
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop records with a lower score. "none" here and in `keep_top`: score only."""
    keep_top: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep this share of each domain's records, the best ones."""
    example_bytes: Bytes = Field(default=4 << 20, ge=1 << 12)
    """Most text of each label to learn from; of more, a sample by hash."""
    allow_weak: bool = False
    """Use the classifier although it has few examples or tells good from bad hardly better than chance."""

    @property
    def is_on(self) -> bool:
        return bool(self.good or self.bad or self.labelled or self.model)


class NoiseSection(Section):
    clean: str = ""
    """Clean text: a folder or file, or "corpus" for a sample of the records. Turns the stage on: the contrast of a
    record is its bits per byte under a model of clean text less those under a model of noise (Moore-Lewis)."""
    noisy: str = ""
    """Noise: a folder or file. Empty: made from the clean text, see `kinds`."""
    kinds: tuple[Kind, ...] = ("shuffled", "ocr", "boilerplate", "encoded", "symbols")
    """Noise that is made: words in random order, letters as a bad scan has them, menus and footers, base64 and hex,
    random signs."""
    domains: tuple[str, ...] = ()
    """Score records of these domains; others stay. Empty: all."""
    clean_loss: float = Field(default=0.01, gt=0, lt=0.5)
    """Share of clean text that may be lost: the threshold is the contrast that this share of held-out text exceeds.
    With "corpus", which holds noise itself, that which this share of a normal distribution with its median and lower
    quartile exceeds. Needs 300 clean texts."""
    threshold: float | None = None
    """Drop records with a greater contrast, in bits per byte, in place of `clean_loss`."""
    order: int = Field(default=5, ge=2, le=8)
    """Bytes of the longest n-gram."""
    reference_bytes: Bytes = Field(default=4 << 20, ge=1 << 12)
    """Most clean text to learn from; of more, a sample by hash."""
    allow_weak: bool = False
    """Use the filter although it tells held-out noise from clean text hardly better than chance, or has few texts."""

    @property
    def is_on(self) -> bool:
        return bool(self.clean)


class SampleSection(Section):
    reference: str = ""
    """Text of the kind that is wanted most: a folder or file, or "corpus" for a sample of the records. Turns the stage
    on: an n-gram model of it gives the bits per byte of each record, by which records are sampled (CCNet)."""
    weights: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (1.0, 0.5, 0.25)
    """Share that stays of each bucket. Buckets hold equally many records of a domain, from the fewest bits per byte to
    the most; three are CCNet's head, middle and tail."""
    shape: Literal["steps", "smooth"] = "steps"
    """`smooth`: the weights are points of a line over the rank by bits per byte, from the lowest to the highest."""
    domains: tuple[str, ...] = ()
    """Sample records of these domains; others stay. Empty: all."""
    domain_weights: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default={})
    """Factor on the weights of a domain. Others: 1."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Which records stay: a hash of it and of the text."""
    order: int = Field(default=5, ge=2, le=8)
    """Bytes of the longest n-gram."""
    reference_bytes: Bytes = Field(default=4 << 20, ge=1 << 12)
    """Most text to learn from; of more, a sample by hash."""

    @property
    def is_on(self) -> bool:
        return bool(self.reference)


def paths(quality: QualitySection, noise: NoiseSection, sample: SampleSection) -> dict[str, str]:
    """The files and folders that the stages of scores learn from, by setting."""
    found = {f"quality.{name}": getattr(quality, name) for name in ("good", "bad", "labelled", "model")}
    found |= {"noise.clean": noise.clean, "noise.noisy": noise.noisy, "sample.reference": sample.reference}
    return {name: path for name, path in found.items() if path and path != CORPUS}


def absolute(section: Section, folder: Path) -> Section:
    """A section of settings of scores with its paths relative to the folder of the data.toml, made absolute."""
    names = {"good", "bad", "labelled", "model", "clean", "noisy", "reference"} & set(type(section).model_fields)
    given = {name: getattr(section, name) for name in names if getattr(section, name) not in ("", CORPUS)}
    return section.model_copy(update={k: str((folder / Path(v).expanduser()).absolute()) for k, v in given.items()})


def void(quality: QualitySection, noise: NoiseSection, sample: SampleSection) -> Iterator[tuple[bool, str, tuple]]:
    """Settings of scores that are void: (whether it is so, what, settings that it makes void)."""
    for name, section in (("quality", quality), ("noise", noise), ("sample", sample)):
        switch = {"quality": "good", "noise": "clean", "sample": "reference"}[name]
        others = tuple(f"{name}.{one}" for one in type(section).model_fields if one != switch)
        yield not section.is_on, f"{name}.{switch} is not given", others
    learned = ("quality.example_bytes", "quality.allow_weak")
    yield bool(quality.model), "quality.model is given", learned
    yield bool(noise.noisy), "noise.noisy is given", ("noise.kinds",)
    yield noise.threshold is not None, "noise.threshold is given", ("noise.clean_loss",)


def conflicts(
    quality: QualitySection, noise: NoiseSection, sample: SampleSection, keep: str
) -> Iterator[tuple[str, Problem]]:
    """Conflicts in the settings of scores: (setting, problem) of those that are right one by one and not together.
    `keep` is `duplicates.keep`."""
    given = [name for name in ("good", "bad", "labelled", "model") if getattr(quality, name)]
    if given not in ([], ["good", "bad"], ["labelled"], ["model"]):
        got, need = ", ".join(given), "good and bad, or labelled, or model"
        yield (
            f"quality.{given[0]}",
            Problem("Quality model cannot be made of these", got, need, 'good = "A", bad = "B"'),
        )
    if quality.threshold is not None and quality.keep_top is not None:
        got = f"threshold = {quality.threshold}, keep_top = {quality.keep_top}"
        yield "quality.keep_top", Problem("Two rules on the quality score", got, "one of them", 'threshold = "none"')
    if keep == "score" and not quality.is_on:
        got, need = 'duplicates.keep = "score"', "a quality score: examples or a model in [quality]"
        yield "duplicates.keep", Problem("Best of several copies without a score", got, need, 'keep = "longest"')
    if noise.is_on and not noise.noisy and not noise.kinds:
        yield "noise.kinds", Problem("Noise filter without noise", "kinds = []", "kinds or noisy", 'kinds = ["ocr"]')
    if sample.is_on and not sample.weights:
        need = "a number from 0 to 1 for each bucket"
        yield "sample.weights", Problem("Sampling without weights", "weights = []", need, "weights = [1.0, 0.5, 0.25]")

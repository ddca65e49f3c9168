"""Third stage: which records keep to the rules, and by which rule each other one goes.

What stays is a side table, not a copy of the text: row, digest of the text, bytes, language. Every measure that a rule
looks at goes into a histogram by domain, of all records that it was taken of.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from tilewright.core.errors import ConfigError
from tilewright.data.build.config import RulesSection
from tilewright.data.build.engine.declared import Same, per_shard
from tilewright.data.build.engine.stage import BuildStage
from tilewright.data.build.stages.text.measures import MEASURES, Measured
from tilewright.data.build.tables import REJECTS, TableWriter, reject_row, rows
from tilewright.data.common.records import Rejected

STAGE = "rules"
SCORES = ("quality", "contrast", "bits_per_byte")
"""Columns that the stages of `scores` fill."""
KEPT = pa.schema(
    [
        pa.field("row", pa.int64()),
        pa.field("digest", pa.binary(16)),
        pa.field("bytes", pa.int64()),
        pa.field("language", pa.string()),
        *(pa.field(name, pa.float32()) for name in SCORES),
    ]
)
"""A record that stays. A score is null where no stage gave one."""
_NUM_BINS = 32
_LANGUAGE_CHARS = 4096  # of a text: from more, nothing is learned about one in one language
_LONG_SCALE = ("chars", "words", "stop_words", "sentences", "curly_brackets")  # counts: bins of powers of two

Language = Callable[[str], tuple[str, float]]
"""The language of a text as ISO 639-1 code, and its probability."""


@dataclass(frozen=True)
class ActiveRule:
    """One rule: `name` of its setting, the measure that it looks at, and the value up to (or from) which it passes."""

    name: str
    measure: str
    value: float
    is_least: bool

    def passes(self, found: float) -> bool:
        return found >= self.value if self.is_least else found <= self.value


def thresholds(rules: RulesSection) -> list[ActiveRule]:
    """The rules that are on, in the order of the settings."""
    found = []
    for name, value in rules:
        kind, _, measure = name.partition("_")
        if kind in ("min", "max") and measure in MEASURES and value is not None:
            found.append(ActiveRule(name, measure, value, kind == "min"))
    return found


def apply_rules(index: int, settings: SimpleNamespace, folder: Path, *, records: Path) -> Mapping[str, Any]:
    """Judge the records of a shard; writes `kept.parquet`, `rejects.parquet` and `histograms.json` into `folder`."""
    rules = settings.rules
    active = thresholds(rules)
    language = find_languages() if rules.languages else None
    histograms: dict[str, np.ndarray] = {}
    with (
        TableWriter(folder / "kept.parquet", KEPT) as kept,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        num_bytes = 0
        for number, row in enumerate(rows(records / "records.parquet")):
            data = row["text"].encode()
            reject, found = None, row["language"]
            if row["modality"] == "text" and (not rules.domains or row["domain"] in rules.domains):
                reject = _broken_rule(row, active, histograms)
                if reject is None and language is not None:
                    found, score = language(row["text"])
                    reject = _wrong_language(row, found, score, rules)
            if reject is not None:
                rejects.append(reject_row(reject))
                continue
            digest = xxhash.xxh3_128_digest(_identity(row, data))
            kept.append({"row": number, "digest": digest, "bytes": len(data), "language": found})
            num_bytes += len(data)
        counts = {"records": kept.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    plain = {key: counts_.tolist() for key, counts_ in sorted(histograms.items())}
    (folder / "histograms.json").write_text(json.dumps(plain, sort_keys=True))
    return counts


def _identity(row: Mapping[str, Any], data: bytes) -> bytes:
    """What makes two records the same: the text, and of a medium what its facts say of its content."""
    return data if row["modality"] == "text" else f"{row['modality']}\0{row['facts']}\0".encode() + data


def _broken_rule(
    row: Mapping[str, Any], active: list[ActiveRule], histograms: dict[str, np.ndarray]
) -> Rejected | None:
    """The reject of the first rule that the record breaks, or None; measures go into the histograms."""
    text = Measured(row["text"])
    broken: Rejected | None = None
    values: dict[str, float] = {}
    for rule in active:
        value = values.get(rule.measure)
        if value is None:
            value = values[rule.measure] = float(MEASURES[rule.measure](text))
            key = f"{row['domain']}\0{rule.measure}"
            histograms.setdefault(key, np.zeros(_NUM_BINS, np.int64))[_bin(rule.measure, value)] += 1
        if broken is None and not rule.passes(value):
            broken = _reject(row, rule.name, value, rule.value)
    return broken


def _wrong_language(row: Mapping[str, Any], found: str, score: float, rules: RulesSection) -> Rejected | None:
    if found not in rules.languages:
        return _reject(row, "languages", found, ", ".join(rules.languages))
    if rules.min_language_score is not None and score < rules.min_language_score:
        return _reject(row, "min_language_score", score, rules.min_language_score)
    return None


def _reject(row: Mapping[str, Any], rule: str, value: float | str, threshold: float | str) -> Rejected:
    size = len(row["text"].encode())
    place = row["path"], row["part"]
    return Rejected(*place, STAGE, rule, value, threshold, row["text"], row["domain"], 1, size, row["id"])


def _bin(measure: str, value: float) -> int:
    if measure in _LONG_SCALE:
        return min(_NUM_BINS - 1, int(value).bit_length())
    return min(_NUM_BINS - 1, int(value * (_NUM_BINS / (16.0 if measure == "mean_word_chars" else 1.0))))


def bin_starts(measure: str) -> list[float]:
    """Where each bin of a measure's histogram begins; the last one is open.

    Example:
        >>> bin_starts("words")[:5], bin_starts("short_lines")[:3]
        ([0, 1, 2, 4, 8], [0.0, 0.03125, 0.0625])
    """
    if measure in _LONG_SCALE:
        return [0, *(1 << i for i in range(_NUM_BINS - 1))]
    width = (16.0 if measure == "mean_word_chars" else 1.0) / _NUM_BINS
    return [i * width for i in range(_NUM_BINS)]


def find_languages() -> Language:
    """Finds languages with py3langid.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise ConfigError(
            "Rule on languages without the library that finds them",
            where="rules.languages",
            got=str(error),
            need="py3langid from 0.4 on, which carries its model",
            try_="pip install py3langid",
        ) from error
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def find(text: str) -> tuple[str, float]:
        code, score = identifier.classify(text[:_LANGUAGE_CHARS])
        return str(code), float(score)

    return find


def survivors(kept: Path, *drops: np.ndarray) -> Iterator[dict[str, Any]]:
    """Rows of a `kept.parquet` whose `row` is in none of the sorted arrays `drops`."""
    gone = set(np.concatenate([np.zeros(0, np.int64), *drops]).tolist())
    for row in rows(kept):
        if row["row"] not in gone:
            yield row


RULES = BuildStage(
    *("rules", "applying rules", 2, per_shard, apply_rules, ("rules",)),
    {"records": Same("repair")},
)

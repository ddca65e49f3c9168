"""Third stage: which records pass the rules, and by which rule each other one is dropped.

Every measure that a rule looks at goes into a histogram by domain, of all records that it was taken of.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from tilewright.core.errors import ConfigError
from tilewright.data.common.record_filter import DropReason, RecordFilter
from tilewright.data.common.records import Record
from tilewright.data.engine.build_settings import RulesSection
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import AddedSetting, Same, per_shard
from tilewright.data.engine.record_tables import REJECTS, TableWriter, record_of, rows
from tilewright.data.stages.chat.chat_settings import TEXT
from tilewright.data.stages.chat.conversation_records import row_of_facts
from tilewright.data.stages.kept_records import KEPT, reject_of
from tilewright.data.stages.text.text_measures import MEASURES, Measured

STAGE = "rules"
_NUM_BINS = 32
_LANGUAGE_CHARS = 4096  # of a text: from more, nothing is learned about one in one language
_LONG_SCALE = ("chars", "words", "stop_words", "sentences", "curly_brackets")  # counts: bins of powers of two

Language = Callable[[str], tuple[str, float]]
"""The language of a text as ISO 639-1 code, and its probability."""


@dataclass(frozen=True)
class ActiveRule:
    """An active text rule: `name` of its setting, its measure, and the value up to (or from) which records pass."""

    name: str
    measure: str
    value: float
    is_least: bool

    def passes(self, found: float) -> bool:
        return found >= self.value if self.is_least else found <= self.value


def thresholds(rules: RulesSection) -> list[ActiveRule]:
    """Thresholds of the text rules that are on, in the order of the settings."""
    found = []
    for name, value in rules:
        kind, _, measure = name.partition("_")
        if kind in ("min", "max") and measure in MEASURES and value is not None:
            found.append(ActiveRule(name, measure, value, kind == "min"))
    return found


class ThresholdFilter(RecordFilter):
    """Drops records by the first rule that they break.

    Args:
        rules: settings.
    """

    def __init__(self, rules: RulesSection):
        self._active = thresholds(rules)
        self.histograms: dict[str, np.ndarray] = {}
        """Of each measure that was taken, int64 [bins], by domain and measure."""

    def judge(self, record: Record) -> DropReason | None:
        """The rule's judgement by thresholds: the reason to drop a record, or None: see `RecordFilter`. Each measure is
        taken that any rule looks at."""
        text = Measured(record.text)
        broken: DropReason | None = None
        values: dict[str, float] = {}
        for rule in self._active:
            value = values.get(rule.measure)
            if value is None:
                value = values[rule.measure] = float(MEASURES[rule.measure](text))
                counts = self.histograms.setdefault(f"{record.domain}\0{rule.measure}", np.zeros(_NUM_BINS, np.int64))
                counts[_bin(rule.measure, value)] += 1
            if broken is None and not rule.passes(value):
                broken = DropReason(rule.name, value, rule.value)
        return broken


class LanguageFilter(RecordFilter):
    """Drops records in other languages than those of the rules.

    Args:
        rules: settings.
    """

    def __init__(self, rules: RulesSection):
        self._rules, self._find = rules, find_languages()
        self.found = ""
        """The language of the record that was judged last."""

    def judge(self, record: Record) -> DropReason | None:
        """The rule's judgement by language: the reason to drop a record, or None: see `RecordFilter`."""
        self.found, score = self._find(record.text)
        least = self._rules.min_language_score
        if self.found not in self._rules.languages:
            return DropReason("languages", self.found, ", ".join(self._rules.languages))
        return DropReason("min_language_score", score, least) if least is not None and score < least else None


def apply_rules(
    index: int, settings: SimpleNamespace, folder: Path, *, records: Path, format: str
) -> Mapping[str, Any]:
    """Judge the records of a shard by the rules, and write `kept.parquet`, `rejects.parquet` and `histograms.json` into
    `folder`."""
    rules = settings.rules
    measured = ThresholdFilter(rules)
    spoken = LanguageFilter(rules) if rules.languages else None
    are_on = bool(thresholds(rules)) or spoken is not None
    num_bytes = 0
    with (
        TableWriter(folder / "kept.parquet", KEPT) as kept,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        for number, row in enumerate(rows(records / "records.parquet")):
            reason, language = None, row["language"]
            # Rules are of text, and of the domains that are named; other records pass.
            if are_on and row["modality"] == "text" and (not rules.domains or row["domain"] in rules.domains):
                record = record_of(row)
                reason = measured.judge(record)
                if reason is None and spoken is not None:
                    reason, language = spoken.judge(record), spoken.found
            if reason is not None:
                rejects.append(reject_of(row, STAGE, reason))
                continue
            # The digest by which copies are found.
            data = row["text"].encode()
            digest = xxhash.xxh3_128_digest(_identity(row, data, format))
            kept.append({"row": number, "digest": digest, "bytes": len(data), "language": language})
            num_bytes += len(data)
        counts = {"records": kept.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    # Histograms hold all records, those that go too: a user sees what another threshold would do.
    plain = {key: counts_.tolist() for key, counts_ in sorted(measured.histograms.items())}
    (folder / "histograms.json").write_text(json.dumps(plain, sort_keys=True))
    return counts


def _identity(row: Mapping[str, Any], data: bytes, format: str) -> bytes:
    """The identity of a record for the rules: the text, of a conversation the whole row, with the system's message and
    the tools, and of a medium what its facts say of its content."""
    if row["modality"] != "text":
        return f"{row['modality']}\0{row['facts']}\0".encode() + data
    return data if format == TEXT else row_of_facts(row["facts"]).encode()


def _bin(measure: str, value: float) -> int:
    if measure in _LONG_SCALE:
        return min(_NUM_BINS - 1, int(value).bit_length())
    return min(_NUM_BINS - 1, int(value * (_NUM_BINS / (16.0 if measure == "mean_word_chars" else 1.0))))


def bin_starts(measure: str) -> list[float]:
    """The start of each histogram bin of a measure on the rules' page; the last bin is open.

    Example:
        >>> bin_starts("words")[:5], bin_starts("short_lines")[:3]
        ([0, 1, 2, 4, 8], [0.0, 0.03125, 0.0625])
    """
    if measure in _LONG_SCALE:
        return [0, *(1 << i for i in range(_NUM_BINS - 1))]
    width = (16.0 if measure == "mean_word_chars" else 1.0) / _NUM_BINS
    return [i * width for i in range(_NUM_BINS)]


def find_languages() -> Language:
    """Finds languages for the rules with py3langid.

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


RULES = BuildStage(
    *("rules", "applying rules", 2, per_shard, apply_rules, ("rules",)),
    {"records": Same("repair"), "format": AddedSetting("chat.format")},
)

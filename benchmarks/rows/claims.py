"""The rows of docs/benchmarks.md: each claim with its target, what was measured, and the verdict; from results/*.json.

A target names its side ("at most", "at least"). A change of loss may be as far below zero as it likes: lower is better.
A claim that needs a GPU is a row without a measurement until there is a result of one. `claims.toml` has the sections,
and the rows of studies whose program has left.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.rows import compress_rows, numerics_rows, run_rows, speed_rows
from benchmarks.rows.claim_rows import Group, Result, Row, read
from benchmarks.rows.gpu_targets import TARGETS, judged, record_of
from benchmarks.rows.verdict import NOT_RUN, Verdict

H200 = "NVIDIA H200"
_DATA = tomllib.loads((Path(__file__).parent / "claims.toml").read_text(encoding="utf-8"))
UNUSED: Mapping[str, str] = _DATA["unused"]
"""Result files without a row, and why."""
SECTIONS: Sequence[Mapping[str, Any]] = _DATA["section"]
MADE: Mapping[str, Sequence[Callable[[], Iterator[Row]]]] = {
    "Speed": (speed_rows.speed, lambda: gpu_rows("fp8"), lambda: gpu_rows("paths")),
    "Memory": (speed_rows.memory, lambda: gpu_rows("memory")),
    "Numerics": (numerics_rows.rows, lambda: gpu_rows("loss")),
    "Planner accuracy": (run_rows.plans,),
    "Default job": (run_rows.default_job,),
    "Fine-tuning": (run_rows.generation,),
    "Exports": (compress_rows.exports,),
    "Smaller models": (compress_rows.smaller,),
    "Reliability": (run_rows.reliability,),
}
"""What makes rows from results of programs that are here, by section."""


def groups() -> list[Group]:
    """All sections of the page."""
    return [_group(section) for section in SECTIONS]


def _group(section: Mapping[str, Any]) -> Group:
    """Rows that are made, then those of studies."""
    title, studies = section["title"], section.get("study", ())
    rows = [row for make in MADE.get(title, ()) for row in make()]
    rows += [row for study in studies for row in study_rows(study)]
    tables = [study["table"] for study in studies if "table" in study]
    return Group(title, rows, section.get("to_run", ""), section.get("note", ""), tables)


def study_rows(study: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a study whose program has left, as they were judged when it did."""
    result = read(study["result"])
    for metric, target, measured, status, *why in study["rows"]:
        yield Row(f"{result.name}: {metric}", metric, target, Verdict(measured, status, *why), result)


def gpu_rows(group: str, folder: Path = RESULTS / "gpu") -> Iterator[Row]:
    """What `benchmarks.gpu` measures of a group, from the card's files where there are any."""
    for target in TARGETS[group]:
        record = record_of(target.part, folder)
        verdict = judged(target, record)
        result = Result(f"gpu/{target.part}", record) if record and verdict.status != NOT_RUN else None
        row = Row(target.key, target.metric, target.target, verdict, result, "" if result else H200)
        yield row if result else replace(row, verdict=Verdict("-", NOT_RUN))


def by_key(found: Sequence[Group]) -> dict[str, Row]:
    """All rows by their keys."""
    return {row.key: row for group in found for row in group.rows}

"""What the rows of docs/benchmarks.md are made of: result files, rows, groups."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, place
from benchmarks.rows.verdict import Verdict

REMOVED = {
    name: commit
    for commit, names in tomllib.loads((RESULTS.parent / "removed.toml").read_text(encoding="utf-8")).items()
    for name in names
}
"""Programs that are no longer kept, as `runs.big_cpu`, and the last commit that has each."""


@dataclass(frozen=True)
class Result:
    """One result file."""

    name: str
    record: Mapping[str, Any]

    @property
    def program(self) -> str:
        """That wrote it, as `runs.big_cpu`."""
        return self.record["command"].split()[2].removeprefix("benchmarks.")

    @property
    def last_commit(self) -> str | None:
        """The last one that has the program; None where it is here."""
        return REMOVED.get(self.program)

    @property
    def results(self) -> Mapping[str, Any]:
        return self.record["results"]


@dataclass(frozen=True)
class Row:
    """A row of the page."""

    key: str
    """How README's table of headline claims names it."""
    metric: str
    target: str
    verdict: Verdict
    result: Result | None
    """Where the number is from; None where it was not run."""
    hardware: str = ""

    @property
    def where(self) -> str:
        if self.result is None:
            return self.hardware
        return self.result.record["machine"].get("gpu") or place(self.result.record)

    @property
    def date(self) -> str:
        return self.result.record["date"] if self.result else "-"


@dataclass(frozen=True)
class Group:
    """A section of the page."""

    title: str
    rows: Sequence[Row]
    to_run: str = ""
    """Command that measures the rows that were not run."""
    note: str = ""


def read(name: str) -> Result:
    """One result file."""
    return Result(name, json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def read_all(prefix: str) -> list[Result]:
    """The result files of one benchmark, one per machine."""
    return [read(path.stem) for path in sorted(RESULTS.glob(f"{prefix}_*.json"))]

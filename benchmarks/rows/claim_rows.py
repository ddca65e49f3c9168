"""What the rows of docs/benchmarks.md are made of: result files, claims, rows, groups.

A claim that is one number of a result file, or samples of one, is data: a `Claim`. What takes more than that is a
function of the result. `of` says which file, or those of all machines, they are about.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import RESULTS, place
from benchmarks.rows.verdict import NOT_RUN, Verdict, once, turns

GIB, MIB = 2**30, 2**20
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
    def results(self) -> Mapping[str, Any]:
        return self.record["results"]

    @property
    def program(self) -> str:
        """That wrote it, as `runs.big_cpu`."""
        return program_of(self.record["command"])


def program_of(command: str) -> str:
    """The program of a command.

    Example:
        >>> program_of("python -m benchmarks.runs.big_cpu --steps 5")
        'runs.big_cpu'
    """
    return command.split()[2].removeprefix("benchmarks.")


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
    tables: Sequence[str] = ()
    """Of studies, below all others."""


def read(name: str) -> Result:
    """One result file."""
    return Result(name, json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def read_all(pattern: str) -> list[Result]:
    """Result files by name; those of all machines by a pattern such as `ops_*`."""
    return [read(path.stem) for path in sorted(RESULTS.glob(f"{pattern}.json"))]


def row(
    result: Result, key: str, metric: str, target: str, value: Any, text: str = "{:.2f}x", *, said: str = "",
    **bound: float,
) -> Row:  # fmt: skip
    """A row of one number, or of samples that were taken in turns.

    Args:
        result: where it is from.
        key: names the row.
        metric: what is measured.
        target: in words: "at most 2 %", "at least 3x" are bounds; any other has none, or `bound` says it.
        value: the number, in the target's unit; or samples, or the `spread` of them.
        text: how a number is written.
        said: the measurement in words, of one number.
        bound: `at_most` or `at_least`, where the target's words do not say it.
    """
    bound = bound or bound_of(target)
    samples = value["samples"] if isinstance(value, Mapping) else value
    if isinstance(samples, Sequence):
        return Row(key, metric, target, turns(samples, text.format, **bound), result)
    return Row(key, metric, target, once(samples, said or text.format(samples), **bound), result)


def bound_of(target: str) -> dict[str, float]:
    """The bound that a target's words begin with.

    Example:
        >>> bound_of("at most 1.35x"), bound_of("at least 10 MB, each"), bound_of("-")
        ({'at_most': 1.35}, {'at_least': 10.0}, {})
    """
    found = re.match(r"at (most|least) ([-+]?\d[\d.]*(?:e-?\d+)?)", target)
    return {f"at_{found[1]}": float(found[2])} if found else {}


Measure = Callable[[Result], Iterable[Row]]
"""Rows of a result."""


@dataclass(frozen=True)
class Claim:
    """A claim that is about one place of a result. See `row`.

    Args:
        key: `{result}` in it is the name of the file.
        metric, target, text: as in a row.
        at: keys that lead to the number or its samples, with slashes between.
        scale: from the file's unit to the target's.
    """

    key: str
    metric: str
    target: str
    at: str
    text: str = "{:.2f}x"
    scale: float = 1.0

    def __call__(self, result: Result) -> Iterator[Row]:
        found: Any = result.results
        for name in self.at.split("/"):
            found = found[name]
        samples = found["samples"] if isinstance(found, Mapping) else None
        value = self.scale * found if samples is None else [self.scale * sample for sample in samples]
        yield row(result, self.key.format(result=result.name), self.metric, self.target, value, self.text)


def of(results: str, *measures: Measure) -> Iterator[Row]:
    """Rows of a result file, or of those of all machines.

    Args:
        results: its name; a pattern such as `ops_*` names those of all machines.
        measures: claims, and functions of a result.
    """
    for result in read_all(results):
        for measure in measures:
            yield from measure(result)


def not_run(key: str, metric: str, target: str) -> Row:
    """A claim that nothing has measured yet."""
    return Row(key, metric, target, Verdict("-", NOT_RUN), None, "CPU")

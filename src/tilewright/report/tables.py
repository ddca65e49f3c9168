"""The report's tables: precision, kernels, events, data, settings, machine. Rows of plain text for the template."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.units import format_bytes, format_seconds
from tilewright.report.figures.run_figures import OWNERS
from tilewright.report.run_data.collect_run import Row, RunData
from tilewright.report.svg.axes import format_number


@dataclass(frozen=True)
class FormatGroup:
    """Modules that are treated alike. `members` are their names."""

    pattern: str
    cells: tuple[str, ...]
    members: tuple[str, ...]


def precision_groups(rows: Sequence[Row]) -> list[FormatGroup]:
    """Join rows of precision.json with the same treatment, layer numbers written as `*`, in order of appearance."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        name = str(row.get("fqn", ""))
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) or "(the model itself)"
        cells = tuple(str(row.get(key, "")) for key in ("op", "compute", "storage", "reason"))
        groups.setdefault((pattern, *cells), []).append(name)
    return [FormatGroup(key[0], key[1:], tuple(names)) for key, names in groups.items()]


@dataclass(frozen=True)
class KernelRow:
    """One operation and the implementation chosen for these cases. `rejected`: (candidate, reason)."""

    op: str
    cases: tuple[str, ...]
    chosen: str
    rejected: tuple[tuple[str, str], ...]


def kernel_rows(machine: Row | None) -> list[KernelRow]:
    """Table of kernels of machine.json, cases with the same outcome joined."""
    joined: dict[tuple[Any, ...], list[str]] = {}
    for row in (machine or {}).get("kernels") or []:
        rejected = tuple((str(pair[0]), str(pair[1])) for pair in row.get("rejected", ()))
        joined.setdefault((str(row.get("op")), str(row.get("chosen")), rejected), []).append(str(row.get("case", "")))
    return [KernelRow(op, tuple(cases), chosen, rejected) for (op, chosen, rejected), cases in joined.items()]


@dataclass(frozen=True)
class EventRow:
    """A line of the timeline: `count` like events in a row are one line, with the first's place and message."""

    step: str
    time: str
    kind: str
    message: str
    count: int


def event_rows(events: Sequence[Row]) -> list[EventRow]:
    """Rows of the table of events, in order; runs of evaluations, saves and overflows joined."""
    rows: list[EventRow] = []
    for event in events:
        kind = str(event.get("kind", ""))
        if rows and rows[-1].kind == kind and kind in ("eval", "save", "overflow"):
            last = rows[-1]
            rows[-1] = EventRow(last.step, last.time, kind, str(event.get("message", "")), last.count + 1)
            continue
        seconds = event.get("time_s")
        time = format_seconds(seconds) if isinstance(seconds, (int, float)) else ""
        rows.append(EventRow(str(event.get("step", "")), time, kind, str(event.get("message", "")), 1))
    return rows


@dataclass(frozen=True)
class Facts:
    """A nested summary laid flat for the report: single values, and tables of like rows."""

    values: Sequence[tuple[str, str]]
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]


def facts(summary: Mapping[str, Any] | None, skip: Sequence[str] = ()) -> Facts:
    """Lay a summary flat: scalars as (name, value), mappings as tables (title, columns, rows)."""
    values: list[tuple[str, str]] = []
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = []
    for name, value in (summary or {}).items():
        title = name.replace("_", " ")
        if name in skip:
            continue
        if isinstance(value, Mapping):
            tables.append((title, *_table(value)))
        elif isinstance(value, list):
            values.append((title, ", ".join(_text(name, item) for item in value) or "none"))
        else:
            values.append((title, _text(name, value)))
    return Facts(values, [table for table in tables if table[2]])


def _table(value: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    inner = [row for row in value.values() if isinstance(row, Mapping)]
    if inner and len(inner) == len(value):
        columns = list(dict.fromkeys(key for row in inner for key in row))
        return ["", *(c.replace("_", " ") for c in columns)], [
            [str(name), *(_text(c, row.get(c, "")) for c in columns)] for name, row in value.items()
        ]
    return ["", ""], [[str(name), _text(str(name), item)] for name, item in value.items()]


def _text(name: str, value: object) -> str:
    """Write a value of the report's tables as people read it: sizes by the unit in their name, counts with
    separators."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if name == "bytes" or name.endswith("_bytes"):
            return format_bytes(value)
        if name == "seconds" or name.endswith(("_s", "_seconds")):
            return format_seconds(value)
        return f"{value:,}" if isinstance(value, int) else format_number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(str(key), item)}" for key, item in value.items()) or "none"
    return str(value)


def changed_settings(run: RunData) -> int:
    """Count the settings of the recipe that do not come from a default."""
    return sum(1 for setting in run.settings if setting.source != "default")


def memory_table(run: RunData) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Table of measured bytes by owner (rows) at the highest peak of each phase (columns) of the run; empty if not
    recorded."""
    peaks: dict[str, Mapping[str, float]] = {}
    for row in run.steps:
        for phase, owners in (row.get("memory_phases") or {}).items():
            if sum(owners.values()) > sum(peaks.get(phase, {}).values()):
                peaks[phase] = owners
    owners = [owner for owner in OWNERS if any(held.get(owner) for held in peaks.values())]
    rows = [[owner, *(_bytes(held.get(owner, 0)) for held in peaks.values())] for owner in owners]
    total = [["sum", *(_bytes(sum(held.values())) for held in peaks.values())]] if peaks else []
    return ["owner", *peaks], [*rows, *total]


def tier_rows(run: RunData) -> Sequence[tuple[str, str, str]]:
    """Table of tiers: (tier, owner, most bytes) of what is off the device."""
    most: dict[tuple[str, str], float] = {}
    for row in run.steps:
        for tier, owners in (row.get("memory_tiers") or {}).items():
            for owner, size in owners.items():
                most[tier, owner] = max(most.get((tier, owner), 0), size)
    return [(tier, owner, format_bytes(size)) for (tier, owner), size in most.items()]


def _bytes(size: float) -> str:
    return format_bytes(size) if size else "-"

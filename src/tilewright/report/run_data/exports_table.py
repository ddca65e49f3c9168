"""The matrix of exports: each artefact of a run, what became of it in its consumer, and the baselines beside them.

Made from exports.json, which other programs may have damaged: a value of another type than expected is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compress.exports_file import change_since
from tilewright.core.units import format_bytes
from tilewright.report.run_data.clean_rows import Row, number

COLUMNS = (
    "Target",
    "Consumer",
    "State",
    "Bytes",
    "Of FP32",
    "KL",
    "Of stored",
    "Clear top 1",
    "Worst domain",
    "Same ids",
    "Prefill 32",
    "Prefill 256",
    "Cached token",
    "Memory",
)
STATES = {"ran": "good", "lint only": "not_measured", "unavailable": "not_measured", "failed": "bad"}
"""State of a row -> class of its badge on the page; others are worth a look."""


@dataclass(frozen=True)
class Exports:
    """The table of exports on a page: a line of conditions, cells under `COLUMNS`, remarks as (target, text)."""

    conditions: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    remarks: list[tuple[str, str]]

    @classmethod
    def of(cls, record: Mapping[str, Any], run: Path) -> "Exports":
        """The table of exports, from exports.json as read."""
        return cls(conditions(record), COLUMNS, table_rows(record), remarks(record, run))

    @staticmethod
    def css_class(state: str) -> str:
        """The CSS class of a badge in the table of exports, by state."""
        return f"state state-{STATES.get(state, 'look')}"


def table_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows of the table of exports: cells under `COLUMNS`, the baselines first."""
    whole = number(record.get("fp32_bytes"))
    baselines = [{**row, "target": row.get("name"), "consumer": "tilewright"} for row in _rows(record, "baselines")]
    return [_cells(row, whole) for row in [*baselines, *_rows(record, "artefacts")]]


def remarks(record: Mapping[str, Any], run: Path) -> list[tuple[str, str]]:
    """Remarks under the table of exports, (target, text): reasons, notes, and artefacts that are no longer what was
    proven."""
    found = []
    for row in _rows(record, "artefacts"):
        notes = [row.get("notes"), row.get("runtime_notes")]
        texts = [row.get("reason"), *(text for some in notes if isinstance(some, list) for text in some)]
        texts += [change_since(row, run), _measured_apart(row, record)]
        found += [(str(row.get("target", "")), text) for text in texts if isinstance(text, str) and text]
    for row in _rows(record, "baselines"):
        if isinstance(row.get("reason"), str) and row["reason"]:
            found.append((str(row.get("name", "")), row["reason"]))
    return found


def conditions(record: Mapping[str, Any]) -> str:
    """Conditions under the table of exports, in which they were measured, in a line."""
    return f"{_on(record.get('machine'))}; weights of {record.get('checkpoint')}"


def _measured_apart(row: Row, record: Mapping[str, Any]) -> str | None:
    """Conditions under the table of exports of an artefact of an earlier export, where they differ; None where they do
    not."""
    if not isinstance(row.get("measured"), dict) or row.get("state") != "ran":
        return None
    then, now = _on(row["measured"]), _on(record.get("machine"))
    return f"kept from an earlier export, measured on {then}" if then != now else None


def _on(machine: object) -> str:
    machine = machine if isinstance(machine, dict) else {}
    threads, clock = number(machine.get("threads")), number(machine.get("clock_mhz"))
    parts = [str(machine.get("cpu") or "a CPU that is not recorded")]
    parts += [kind] if isinstance(kind := machine.get("cpu_class"), str) and kind else []
    parts += [f"at {clock:.0f} MHz"] if clock else []
    parts += [f"{threads:.0f} {'thread' if threads == 1 else 'threads'}"] if threads else []
    parts += [date] if isinstance(date := machine.get("date"), str) and date else []
    return ", ".join(parts)


def _rows(record: Mapping[str, Any], key: str) -> list[Row]:
    rows = record.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _cells(row: Row, fp32_bytes: float | None) -> tuple[str, ...]:
    size, kl, memory = (number(row.get(key)) for key in ("bytes", "kl", "peak_bytes"))
    prefill = found if isinstance(found := row.get("prefill_s"), dict) else {}
    times = sorted((int(n), s) for n, value in prefill.items() if n.isdecimal() and (s := number(value)) is not None)
    return (
        str(row.get("target", "")),
        str(row.get("consumer", "")),
        str(row.get("state", "")),
        format_bytes(size) if size else "",
        f"{size / fp32_bytes:.3f}x" if size and fp32_bytes else "",
        f"{kl:.1e}" if kl is not None else "",
        _stored(row.get("stored")),
        f"{100 * top1:.1f} %" if (top1 := number(row.get("top1_clear"))) is not None else "",
        _worst(row.get("loss")),
        _ids(row.get("token_ids"), row.get("odd_texts")),
        _milliseconds(times[0][1] if times else None),
        _milliseconds(times[-1][1] if len(times) > 1 else None),
        _milliseconds(number(row.get("cached_token_s"))),
        format_bytes(memory) if memory else "",
    )


def _worst(loss: object) -> str:
    """The largest relative change of a domain's loss, for the table of exports."""
    changes = []
    for name, both in loss.items() if isinstance(loss, dict) else ():
        ours, theirs = (number(both.get(key)) if isinstance(both, dict) else None for key in ("fp32", "consumer"))
        if ours and theirs is not None:
            changes.append((theirs / ours - 1, name))
    if not changes:
        return ""
    change, name = max(changes)
    return f"{100 * change:+.2f} % {name}"


def _stored(stored: object) -> str:
    kl = number(stored.get("kl")) if isinstance(stored, dict) else None
    return f"{kl:.1e}" if kl is not None else ""


def _ids(ids: object, odd: object) -> str:
    """Compare token ids of documents and odd texts together for the table of exports; older records have documents
    alone."""
    found = [
        (part.get("equal"), part.get(name))
        for part, name in ((ids, "documents"), (odd, "texts"))
        if isinstance(part, dict)
    ]
    counts = [(equal, total) for equal, total in found if isinstance(equal, int) and isinstance(total, int)]
    return f"{sum(equal for equal, _ in counts)} of {sum(total for _, total in counts)}" if counts else ""


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.2f} ms"

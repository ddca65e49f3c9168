"""The report's table of what the first process has sent to others in a step, beside what the plan expected."""

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.core.units import format_bytes, format_seconds, format_share
from tilewright.report.run_data.collect_run import Row, RunData, number

AXES = {
    "dp_shard": "shards",
    "efsdp": "shards of experts",
    "dp_replicate": "copies",
    "data": "shards and copies",
    "ep": "experts",
    "tp": "matrices that are cut",
    "pp": "stages",
}
OPERATIONS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "send": "message",
}
_PLANNED = {
    "all_gather": ("dp_shard",),
    "reduce_scatter": ("dp_shard",),
    "all_reduce": ("dp_replicate", "data"),
    "all_to_all": ("ep",),
}
"""Along which axes a plan knows an operation."""


@dataclass(frozen=True)
class TrafficView:
    """`words`: all of it in a sentence. `rows`: cells of axis, operation, format, bytes, share, planned bytes. `waits`:
    cells of axis, seconds exposed and hidden, share hidden."""

    words: str
    rows: list[tuple[str, ...]]
    waits: list[tuple[str, ...]]


def traffic_view(run: RunData) -> TrafficView | None:
    """The table of traffic, exchanged bytes; None of a run of one process, and of one that did not count."""
    steps = [row for row in run.steps if number(row.get("sent_bytes"))]
    if not steps:
        return None
    whole = _mean(steps, "sent_bytes")
    exposed, hidden = (_mean(steps, f"exchange_{name}_s") for name in ("exposed", "hidden"))
    words = f"The first process sent {format_bytes(whole)} to others per step, on average over {len(steps):,} steps"
    words += (
        f". It waited {format_seconds(exposed)} for exchanges, and computed beside others for {format_seconds(hidden)}"
    )
    planned = (run.plan or {}).get("sent_bytes")
    rows = [_row(name, steps, whole, planned if isinstance(planned, Mapping) else {}) for name in _kinds(steps)]
    return TrafficView(words + ".", rows, _waits(steps))


def _kinds(steps: list[Row]) -> list[str]:
    """Names `axis.operation.format` of the kinds of traffic, those that send most first."""
    names = dict.fromkeys(
        name for row in steps for name in row if name.startswith("sent_bytes.") and name.count(".") == 3
    )
    return sorted(
        (name.removeprefix("sent_bytes.") for name in names), key=lambda kind: -_mean(steps, f"sent_bytes.{kind}")
    )


def _row(kind: str, steps: list[Row], whole: float, planned: Mapping[str, object]) -> tuple[str, ...]:
    axis, operation, wire = kind.split(".")
    size = _mean(steps, f"sent_bytes.{kind}")
    expected = number(planned.get(operation)) if axis in _PLANNED.get(operation, ()) else None
    text = "not planned" if expected is None else format_bytes(expected)
    share = format_share(size / whole)
    return AXES.get(axis, axis), OPERATIONS.get(operation, operation), wire, format_bytes(size), share, text


def _waits(steps: list[Row]) -> list[tuple[str, ...]]:
    prefix, found = "exchange_exposed_s.", []
    axes = dict.fromkeys(name.removeprefix(prefix) for row in steps for name in row if name.startswith(prefix))
    for axis in axes:
        exposed, hidden = (_mean(steps, f"exchange_{name}_s.{axis}") for name in ("exposed", "hidden"))
        share = format_share(hidden / (exposed + hidden)) if exposed + hidden else ""
        found.append((AXES.get(axis, axis), format_seconds(exposed), format_seconds(hidden), share))
    return found


def _mean(steps: list[Row], name: str) -> float:
    return sum(number(row.get(name)) or 0.0 for row in steps) / len(steps)

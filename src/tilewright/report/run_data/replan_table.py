"""The report's table of what a run decided about its memory while it continued."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.core.units import format_bytes, format_seconds
from tilewright.report.run_data.clean_rows import number
from tilewright.report.run_data.collect_run import Row, RunData

TRIGGERS = {
    "calibration": "first measurement",
    "prediction": "more than expected",
    "budget": "memory there is",
    "shape": "length of rows",
    "out_of_memory": "out of memory",
}

_CROSSED = ("error", "measured_bytes", "expected_bytes", "change", "budget_bytes", "tokens", "limit_bytes")


@dataclass(frozen=True)
class ReplanRow:
    """One decision of a run about its memory, in words. `after` is empty where the memory plan stayed."""

    step: str
    trigger: str
    number: str
    threshold: str
    before: str
    after: str
    expected: str
    message: str


def decisions(run: RunData) -> list[ReplanRow]:
    """List all decisions of a run about its memory, in order."""
    return [_decision(event) for event in run.kinds("replan")]


def summary(found: Sequence[ReplanRow]) -> str:
    """Count a run's decisions about memory, and those that changed something, in words."""
    changed = sum(bool(one.after) for one in found)
    return f"{len(found)} {'decision' if len(found) == 1 else 'decisions'}, {changed} with another memory plan"


def _decision(event: Row) -> ReplanRow:
    trigger = str(event.get("trigger", ""))
    after = str(event.get("after", ""))
    peak, step_s = number(event.get("peak_bytes")), number(event.get("step_s"))
    expected = [] if peak is None else [format_bytes(round(peak))]
    expected += [] if step_s is None else [f"{format_seconds(step_s)} a step"]
    return ReplanRow(
        str(event.get("step", "")),
        TRIGGERS.get(trigger, trigger),
        _number(event),
        _share(number(event.get("threshold"))),
        str(event.get("before", "")),
        after,
        ", ".join(expected),
        str(event.get("message", "")),
    )


def _number(event: Row) -> str:
    """The number in the table of re-plans that crossed the threshold."""
    found = {name: value for name in _CROSSED if (value := number(event.get(name))) is not None}
    if "error" in found:
        sizes = [found[name] for name in ("measured_bytes", "expected_bytes") if name in found]
        beside = " of ".join(format_bytes(round(size)) for size in sizes)
        return f"{_share(found['error'])} ({beside})" if beside else _share(found["error"])
    if "change" in found:
        budget = found.get("budget_bytes")
        return f"{_share(found['change'])} ({format_bytes(round(budget))})" if budget else _share(found["change"])
    if "tokens" in found:
        return f"{found['tokens']:,.0f} tokens"
    if "limit_bytes" in found:
        return f"plans below {format_bytes(round(found['limit_bytes']))}"
    return ""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"

"""A run's step as simulated before it began, beside the measurements of its ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.units import format_bytes, format_seconds, format_share
from tilewright.report.run_data.clean_rows import Row, numbers
from tilewright.report.run_data.collect_run import RunData, number
from tilewright.report.run_data.traffic_table import AXES

_SAME_AXIS = {"efsdp": "dp_shard", "data": "dp_replicate"}
"""Axes of a run that are one in a simulated step."""
_MOST_RANKS, _MOST_OFF = 16, 10.0
COLUMNS = ("", "Simulated", "Measured", "Simulated over measured")


@dataclass(frozen=True)
class ForecastView:
    """`words`: about exchanges and their bound. `rows`: cells of `COLUMNS`."""

    words: str
    rows: list[tuple[str, ...]]


def measured(run: RunData) -> dict[str, Any]:
    """Beside the forecast, measurements of ranks, by the names of the simulated numbers; those not recorded are left
    out. Means per step, without the first one."""
    ranks = [row for row in _list((run.ranks or {}).get("ranks")) if isinstance(row, dict)]
    steps = [row for row in run.steps if number(row.get("sent_bytes"))][1:]
    found: dict[str, Any] = {}
    if seconds := [one for row in ranks if (one := number(row.get("step_s")))]:
        found["step_s"] = max(seconds)
    if steps and any("exchange_exposed_s" in row for row in steps):
        found["exchange_s"] = _mean(steps, "exchange_exposed_s") - _mean(steps, "exchange_exposed_s.pp")
    history = _list((run.pipeline or {}).get("history"))
    if idle := [one for row in history if isinstance(row, dict) and (one := number(row.get("idle"))) is not None]:
        found["idle"] = sum(idle) / len(idle)
    sent: dict[str, float] = {}
    for name in dict.fromkeys(name for row in steps for name in row if name.startswith("sent_bytes.")):
        axis = name.split(".")[1]
        axis = _SAME_AXIS.get(axis, axis)
        sent[axis] = sent.get(axis, 0.0) + _mean(steps, name)
    if sent:
        found["sent_bytes"] = sent
    if peaks := [number(row.get("peak_bytes")) for row in ranks]:
        found["peak_bytes"] = peaks
    return found


def forecast_view(run: RunData) -> ForecastView | None:
    """The table of the forecast of a run on several ranks whose step was simulated; None of others."""
    told = (run.plan or {}).get("simulated")
    if not isinstance(told, Mapping):
        return None
    real, rows = measured(run), list[tuple[str, ...]]()
    for name, label, show in (
        ("step_s", "Step", format_seconds),
        ("idle", "Idle in the pipeline", format_share),
        ("exchange_s", "Exchanges that nothing hides", format_seconds),
    ):
        if (expected := number(told.get(name))) is not None:
            rows.append(_row(label, expected, real.get(name), show))
    expected_bytes, sent = numbers(told.get("sent_bytes")), real.get("sent_bytes", {})
    for axis in dict.fromkeys((*expected_bytes, *sent)):
        label = f"Sent per step: {AXES.get(axis, axis)}"
        rows.append(_row(label, expected_bytes.get(axis), sent.get(axis), format_bytes))
    peaks, held = _list(told.get("peak_bytes")), real.get("peak_bytes", [])
    each = max(1, len(held) // max(1, len(peaks)))
    for rank, size in enumerate(held[:_MOST_RANKS]):
        expected = number(peaks[min(rank // each, len(peaks) - 1)]) if peaks else None
        rows.append(_row(f"Memory of rank {rank}", expected, size, lambda value: format_bytes(round(value))))
    return ForecastView(_words(number(told.get("bound_s")), real.get("exchange_s")), rows) if rows else None


def _words(bound_s: float | None, real_s: float | None) -> str:
    if bound_s is None:
        return ""
    words = f"If nothing of them were hidden, exchanges would take {format_seconds(bound_s)} of the first process"
    if real_s is None:
        return f"{words}."
    verdict = "within that" if real_s <= bound_s else "above that: for slower processes too, or over slower links"
    return f"{words}; it waited {format_seconds(real_s)}, {verdict}."


def _row(label: str, expected: float | None, real: float | None, show: Any) -> tuple[str, ...]:
    texts = ("not known" if value is None else show(value) for value in (expected, real))
    if expected is None or not real:
        return (label, *texts, "")
    off = expected / real - 1
    return (
        label,
        *texts,
        f"{off:+.1%}".replace("%", " %") if off < _MOST_OFF else f"> {_MOST_OFF:.0%}".replace("%", " %"),
    )


def _mean(steps: Sequence[Row], name: str) -> float:
    return sum(number(row.get(name)) or 0.0 for row in steps) / len(steps)


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

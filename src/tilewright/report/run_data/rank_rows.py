"""The report's table of the ranks of a run: steps, waiting and memory of each, and what was seen of them."""

from collections.abc import Callable, Sequence

from tilewright.core.units import format_bytes, format_seconds
from tilewright.report.run_data.collect_run import Row, RunData, number

_SIZES = ("planned_bytes", "peak_bytes")
COLUMNS = ("Rank", "Machine", "Step", "Waits", "Data", "Memory planned", "Memory measured")


def rank_rows(run: RunData) -> list[tuple[str, ...]]:
    """Rows of a run's ranks, cells as text; none for a run of one process."""
    ranks = (run.ranks or {}).get("ranks")
    return [_row(row) for row in ranks if isinstance(row, dict)] if isinstance(ranks, Sequence) else []


def rank_summary(run: RunData) -> str:
    """Number of a run's ranks, and the share of all time that went into steps that count, in words."""
    told = (run.ranks or {}).get("ranks")
    ranks = [row for row in told if isinstance(row, dict)] if isinstance(told, list) else []
    text, step = f"{len(ranks)} processes", (run.ranks or {}).get("step")
    last = max((row["step"] for row in run.steps), default=0)
    if isinstance(step, int) and step < last:  # the run went on with one process, or is between two tables
        text += f" up to step {step} of {last}"
    done = run.kinds("done")
    goodput = number(done[-1].get("goodput")) if done else None
    return text if goodput is None else f"{text}, goodput {goodput:.1%}"


def _row(row: Row) -> tuple[str, ...]:
    seconds = tuple(_text(row.get(name), format_seconds) for name in ("step_s", "wait_s", "data_s"))
    sizes = tuple(_text(row.get(name), lambda size: format_bytes(round(size))) for name in _SIZES)
    return (str(row.get("rank", "")), str(row.get("machine", "")), *seconds, *sizes)


def _text(value: object, show: Callable[[float], str]) -> str:
    found = number(value)
    return "not known" if found is None else show(found)

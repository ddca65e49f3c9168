"""The first lines of the report: one sentence of verdict, and the figures that people ask for first.

Every number comes from the run folder; what is missing is 'not recorded'. Called by `report.page`.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.report.collect import RunData
from tilewright.report.figures import held_out, peak_memory_row
from tilewright.report.scales import format_number, format_percent

MISSING = "not recorded"


@dataclass(frozen=True)
class Tile:
    """One figure of the head of the page."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class LossSpan:
    """First recorded loss, and the mean over the last `count` records, in nats a token."""

    start: float
    end: float
    count: int


def loss_span(run: RunData) -> LossSpan | None:
    """Where the training loss began and ended; the end is a mean over the last twentieth of the records."""
    _, losses = run.column("loss")
    if not losses:
        return None
    count = max(1, len(losses) // 20)
    return LossSpan(losses[0], statistics.fmean(losses[-count:]), count)


def held_out_perplexity(run: RunData) -> list[float]:
    """Perplexity over all domains at each evaluation, weighted by tokens."""
    return [math.exp(point[0]) for row in run.evals if (point := held_out(row))]


def total_tokens(run: RunData) -> float | None:
    """Tokens trained on; the rows count from the start of the run."""
    _, tokens = run.column("tokens")
    return tokens[-1] if tokens else None


def seconds(run: RunData) -> float | None:
    """Seconds from start to the last row, time between a stop and a resume left out."""
    times = [row["time_s"] for row in (*run.steps[-1:], *run.evals[-1:]) if "time_s" in row]
    return max(times) if times else None


def state(run: RunData) -> str:
    """finished, stopped early, or not finished: read from the events."""
    last = next(
        (row["kind"] for row in reversed(run.events) if row.get("kind") in ("done", "stop", "start", "resume")), ""
    )
    return {"done": "finished", "stop": "stopped early"}.get(last, "not finished")


def verdict(run: RunData) -> str:
    """The run in one sentence or two."""
    span, ppl, wall, tokens = loss_span(run), held_out_perplexity(run), seconds(run), total_tokens(run)
    if span is None:
        return "No training step has been recorded yet."
    last_step = int(run.steps[-1]["step"])
    change = "fell" if span.end < span.start else "did not fall: it went"
    text = f"The loss {change} from {span.start:.2f} to {span.end:.2f} nats a token in {last_step:,} steps"
    text += f", and held-out perplexity is {format_number(round(ppl[-1], 1))}" if ppl else ""
    if wall is not None and tokens is not None:
        text += f", after {format_count(tokens)} tokens in {format_seconds(wall)}"
    ending = {"finished": "", "stopped early": " It was stopped early."}.get(state(run), " It has not finished.")
    return f"{text}.{ending}"


def tiles(run: RunData) -> Sequence[Tile]:
    """The figures of the head, always the same ones in the same order."""
    span, ppl = loss_span(run), held_out_perplexity(run)
    _, speeds = run.column("tokens_per_s")
    _, waits = run.column("wait_share")
    wall, tokens, peak = seconds(run), total_tokens(run), peak_memory_row(run)
    planned = (run.plan or {}).get("peak_bytes")
    return [
        Tile(
            "Loss",
            f"{span.start:.2f} \u2192 {span.end:.2f}" if span else MISSING,
            _loss_words(span) if span else "",
        ),
        Tile(
            "Held-out perplexity",
            format_number(round(ppl[-1], 1)) if ppl else MISSING,
            f"was {format_number(round(ppl[0], 1))} at the first evaluation" if len(ppl) > 1 else "",
        ),
        Tile("Tokens", format_count(tokens) if tokens is not None else MISSING, _steps(run)),
        Tile(
            "Throughput",
            f"{format_number(round(statistics.median(speeds)))}/s" if speeds else MISSING,
            f"tokens, median; {format_percent(statistics.median(waits))} waiting for data" if waits else "",
        ),
        Tile("Time", format_seconds(wall) if wall is not None else MISSING, state(run)),
        Tile(
            "Peak memory",
            format_bytes(peak["memory_bytes"]) if peak else MISSING,
            f"planned {format_bytes(planned)}" if planned else "",
        ),
    ]


def _loss_words(span: LossSpan) -> str:
    return f"nats a token, mean of the last {span.count} records" if span.count > 1 else "nats a token, first and last"


def _steps(run: RunData) -> str:
    if not run.steps:
        return ""
    skipped = len(run.kinds("overflow", "skip"))
    return f"in {int(run.steps[-1]['step']):,} steps, {skipped or 'none'} skipped"

"""The first lines of the report: what the run learned in a sentence, and the figures that people ask for first.

Every number comes from the run folder; what is missing is 'not recorded'.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.core.units import (
    format_bits,
    format_bytes,
    format_count,
    format_perplexity,
    format_seconds,
    format_share,
)
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.energy_table import energy_card
from tilewright.report.run_data.run_numbers import (
    LossSpan,
    compressor_lines,
    held_out_bits,
    held_out_losses,
    loss_span,
    peak_memory_row,
    skipped_steps,
    state,
    total_seconds,
    total_tokens,
)
from tilewright.report.svg.axes import format_number

MISSING = "not recorded"


@dataclass(frozen=True)
class SummaryCard:
    """One figure in the report's head, on a card."""

    label: str
    value: str
    detail: str = ""


def learned(run: RunData) -> str:
    """Describe the course of a run's loss with numbers, in the first line of the report's head. No verdict: that is of
    `verdict.judge`."""
    span, held, wall, tokens = loss_span(run), held_out_losses(run, "eval_all"), total_seconds(run), total_tokens(run)
    if span is None:
        return "No loss that is a number has been recorded." if run.steps else "No training step has been recorded yet."
    steps = int(run.steps[-1]["step"])
    if span.end is None:
        text = f"The loss was {_loss(span.start)} nats per token at first and is not finite at step {steps:,}"
    else:
        change = "fell" if span.end < span.start else "did not fall: it went"
        text = f"The loss {change} from {_loss(span.start)} to {_loss(span.end)} nats per token in {steps:,} steps"
    bits = held_out_bits(run, "eval_all")
    if bits:
        text += f", and held-out text takes {format_bits(bits[-1][1])} bits per byte{_compared(run)}"
    elif held:
        text += f", and held-out perplexity is {format_perplexity(held[-1][1])}"
    if wall is not None and tokens is not None:
        text += f", after {format_count(tokens)} tokens in {format_seconds(wall)}"
    ending = {"finished": "", "stopped early": " It was stopped early."}.get(state(run), " It has not finished.")
    return f"{text}.{ending}"


def cards(run: RunData) -> Sequence[SummaryCard]:
    """The summary's cards of figures for the report's head, always the same ones in the same order."""
    span = loss_span(run)
    _, speeds = run.column("tokens_per_s")
    _, waits = run.column("wait_share")
    wall, tokens, peak, planned = total_seconds(run), total_tokens(run), peak_memory_row(run), run.planned("peak_bytes")
    return [
        SummaryCard("Loss", _span(span) if span else MISSING, _loss_words(span) if span else ""),
        _held_out_card(run),
        SummaryCard("Tokens", format_count(tokens) if tokens is not None else MISSING, _steps(run)),
        SummaryCard(
            "Throughput",
            f"{format_number(round(statistics.median(speeds)))}/s" if speeds else MISSING,
            f"tokens, median; {format_share(statistics.median(waits))} waiting for data" if waits else "",
        ),
        SummaryCard("Time", format_seconds(wall) if wall is not None else MISSING, state(run)),
        SummaryCard(
            "Peak memory",
            format_bytes(peak["memory_bytes"]) if peak else MISSING,
            f"planned {format_bytes(planned)}" if planned else "",
        ),
        SummaryCard("Energy", *energy_card(run)),
    ]


def _held_out_card(run: RunData) -> SummaryCard:
    held, bits = held_out_losses(run, "eval_all"), held_out_bits(run, "eval_all")
    if bits:
        lines = [f"{name} -9 {format_bits(value)}" for name, value in compressor_lines(run).items()]
        detail = ", ".join([f"perplexity {format_perplexity(held[-1][1])}", *lines])
        return SummaryCard("Held-out bits per byte", format_bits(bits[-1][1]), detail)
    return SummaryCard(
        "Held-out perplexity",
        format_perplexity(held[-1][1]) if held else MISSING,
        f"was {format_perplexity(held[0][1])} at the first evaluation" if len(held) > 1 else "",
    )


def _compared(run: RunData) -> str:
    lines = compressor_lines(run)
    return f" ({', '.join(f'{name} -9: {format_bits(value)}' for name, value in lines.items())})" if lines else ""


def _loss(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else format_number(value)


def _short(value: float) -> str:
    """A loss for a card of the summary, which has no room for many digits."""
    if abs(value) < 1000:
        return f"{value:.2f}"
    return format_count(value) if abs(value) < 1e15 else f"{value:.2g}"


def _span(span: LossSpan) -> str:
    return f"{_short(span.start)} \u2192 {'not finite' if span.end is None else _short(span.end)}"


def _loss_words(span: LossSpan) -> str:
    if span.end is None or span.count == 1:
        return "nats per token, first and last"
    return f"nats per token, mean of the last {span.count} records"


def _steps(run: RunData) -> str:
    if not run.steps:
        return ""
    return f"in {int(run.steps[-1]['step']):,} steps, {skipped_steps(run) or 'none'} skipped"

"""The gravest rule: did the loss rise for good, or did the numbers of the run stop being numbers?"""

from collections.abc import Sequence
from itertools import takewhile
from statistics import median

from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.run_numbers import held_out, last_process_event
from tilewright.report.svg.axes import format_number as num
from tilewright.report.verdict.curve_levels import difference_error, levels, noise
from tilewright.report.verdict.rule import MIN_RECORDS, Verdict, VerdictRule

FAR_ABOVE_START = 5.0
"""Nats above the first loss from which a run has diverged, however few its steps: 148 times the first perplexity.
The losses of single batches scatter by far less, and an untrained model with 256,000 words has a loss of 12.5."""
SURE = 4.0
"""Standard errors by which a rise must exceed zero. The lowest of twenty levels is by chance 2 below their mean."""
BAD_GRADIENTS = 2
"""Gradients in a row, the last ones of a run without a loss scale, that are not finite: one may be a bad batch."""

DIVERGENCE = VerdictRule(
    name="divergence",
    chart="loss",
    measures=(
        "nats by which the loss at the end of the run (median of the last twentieth of the steps) is above its lowest "
        f"level, less {SURE:g} standard errors of that difference"
    ),
    unit="nats",
    look=0.1,
    bad=0.5,
    why=(
        "The perplexity is 10 % above the best of the run at 0.1 nats, and 65 % above it at 0.5: the steps since then "
        "did harm, and an earlier checkpoint is the better model."
    ),
    besides=(
        "the run was stopped because its numbers were not finite; the loss of the last step, the gradients of the last "
        f"{BAD_GRADIENTS} steps without a loss scale, or the last held-out loss is not finite; the loss ends "
        f"{FAR_ABOVE_START:g} nats or more above that of the first step"
    ),
)


def divergence(run: RunData) -> Verdict:
    """Judge divergence: did the loss rise for good, or stop being a number?"""
    fact = _stopped(run) or _not_finite(run) or _far_above(run)
    if fact:
        return DIVERGENCE.certain(f"The run diverged{fact}.")
    steps, losses = run.column("loss")
    if len(losses) < MIN_RECORDS:
        return DIVERGENCE.too_short(len(losses))
    stretches = levels(losses, width(losses))
    lowest, last = min(stretches, key=lambda one: one.value), stretches[-1]
    rise = last.value - lowest.value
    sure = max(0.0, rise - SURE * difference_error(lowest, last, noise(losses[: lowest.end])))
    if DIVERGENCE.is_good(sure):
        text = f"The loss ends at its lowest level, {num(last.value)} nats per token."
        if rise > 0:
            place = "within its noise of" if not sure else f"{num(rise)} above"
            text = (
                f"The loss ends at {num(last.value)} nats per token, {place} its lowest level of {num(lowest.value)}."
            )
        return DIVERGENCE.judge(sure, text)
    begins = "The run diverged" if sure >= DIVERGENCE.bad else "The loss rose at the end"
    text = (
        f"{begins}: the loss ended at {num(last.value)} nats per token, {num(rise)} above its level of "
        f"{num(lowest.value)} at step {steps[lowest.end - 1]:,.0f}."
    )
    return DIVERGENCE.judge(sure, text)


def width(losses: Sequence[float]) -> int:
    """Width for the rule of divergence, of one level of the loss in records: a twentieth of them, five at least."""
    return max(5, len(losses) // 20)


def _stopped(run: RunData) -> str:
    """A sentence on a run that was stopped on bad numbers; empty if it was not."""
    event = last_process_event(run)
    if event.get("kind") != "stop" or event.get("cause") != "numerics":
        return ""
    why = (str(event.get("message", "")).splitlines() or [""])[0].rstrip(".")
    return f" and was stopped at step {event.get('step')}: {why[:1].lower()}{why[1:]}"


def _not_finite(run: RunData) -> str:
    rows = [row for row in run.steps if "loss" in row]
    if rows and rows[-1]["loss"] is None:
        count = sum(row["loss"] is None for row in rows)
        return f": the loss of the last step is not finite ({count:,} of {len(rows):,} recorded losses are not)"
    unscaled = [row for row in rows if "grad_norm" in row and row.get("skipped") != "overflow"]
    bad = sum(1 for _ in takewhile(lambda row: row["grad_norm"] is None, reversed(unscaled)))
    if bad >= BAD_GRADIENTS:
        return f": the gradients of its last {bad:,} of {len(rows):,} steps are not finite"
    if run.evals and run.evals[-1]["eval_all"] and held_out(run.evals[-1], "eval_all") is None:
        return f": the held-out loss at step {run.evals[-1]['step']:,} is not finite"
    return ""


def _far_above(run: RunData) -> str:
    _, losses = run.column("loss")
    if len(losses) < 2:
        return ""
    end = median(losses[1:][-width(losses) :])
    rise = end - losses[0]
    if rise < FAR_ABOVE_START:
        return ""
    return f": the loss ended at {num(end)} nats per token, {num(rise)} above the {num(losses[0])} of the first step"

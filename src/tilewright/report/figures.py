"""The report's charts: which numbers of a run go into which picture, and what a healthy one looks like.

Each function gives a `Figure`, or None where its numbers were not recorded. Called by `report.page`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.report.charts import Mark, Series, bar_chart, histogram, line_chart, stacked_area
from tilewright.report.collect import RunData
from tilewright.report.fits import LogNormalFit, fit_log_normal, smooth
from tilewright.report.scales import format_number, format_percent

WIDE, LOW = (1080, 320), (1080, 210)
OWNERS = ("parameters", "optimizer", "gradients", "activations", "buffers", "allocator", "other")
MARKED = {
    "resume": 2,
    "precision_switch": 4,
    "precision_move": 1,
    "precision_budget": 7,
    "redo": 6,
    "checkpoint_rejected": 3,
    "save_failed": 3,
    "fallback": 6,
    "overflow": 5,
    "skip": 5,
    "stop": 3,
}
"""Kinds of events drawn on the loss chart, and their colours."""


@dataclass(frozen=True)
class Figure:
    """A chart with its words. `legend`: (colour, name, latest value); `note` is measured, `healthy` is advice."""

    title: str
    svg: str
    healthy: str
    legend: Sequence[tuple[int, str, str]] = ()
    note: str = ""


def held_out(row: dict[str, Any]) -> tuple[float, float] | None:
    """Loss in nats a token over all domains of an evaluation, weighted by tokens, and the number of tokens."""
    parts = [(d["loss"], d["tokens"]) for d in row["eval"].values() if _finite(d.get("loss")) and d.get("tokens")]
    tokens = sum(count for _, count in parts)
    return (sum(loss * count for loss, count in parts) / tokens, tokens) if tokens else None


def loss_figure(run: RunData) -> Figure | None:
    """Training loss, raw and smoothed, held-out loss, and the moments where something changed."""
    steps, losses = run.column("loss")
    if not steps:
        return None
    series = [Series("loss", steps, losses, 0, "faint"), Series("smoothed", *smooth(steps, losses, _window(losses)))]
    legend = [(0, f"training, smoothed over {_window(losses)} records", format_number(series[1].ys[-1]))]
    pooled = [(float(row["step"]), point[0]) for row in run.evals if (point := held_out(row))]
    if pooled:
        series.append(Series("held out", [s for s, _ in pooled], [v for _, v in pooled], 1, "dots"))
        legend.append((1, "held out, all domains", format_number(pooled[-1][1])))
    marks = [
        Mark(float(e["step"]), f"step {e['step']}: {e['kind']}: {e.get('message', '')}", MARKED[e["kind"]])
        for e in run.kinds(*MARKED)
        if _finite(e.get("step"))
    ]
    kinds = sorted({e["kind"] for e in run.kinds(*MARKED)})
    legend += [(MARKED[kind], kind.replace("_", " "), f"{len(run.kinds(kind))} x") for kind in kinds]
    svg = line_chart(series, label="loss over steps", y_label="nats a token", marks=marks, size=WIDE)
    healthy = (
        "Falls steeply, then ever more slowly, with the held-out dots close to the line. A gap that widens means "
        "memorising; a jump that does not come back within tens of steps means divergence."
    )
    return Figure("Loss", svg, healthy, legend)


def perplexity_figure(run: RunData) -> Figure | None:
    """Held-out perplexity of each domain."""
    domains = sorted({domain for row in run.evals for domain in row["eval"]})
    series = []
    for i, domain in enumerate(domains):
        points = [(float(row["step"]), row["eval"][domain].get("ppl")) for row in run.evals if domain in row["eval"]]
        points = [(s, float(p)) for s, p in points if _finite(p)]
        if points:
            series.append(Series(domain, [s for s, _ in points], [p for _, p in points], i % 8))
    if not series:
        return None
    legend = [(s.colour, s.name, format_number(s.ys[-1])) for s in series]
    svg = line_chart(series, label="held-out perplexity by domain", y_label="perplexity", log_y=True)
    healthy = "Every domain falls. One that rises while the others fall is being forgotten: raise its weight."
    return Figure("Held-out perplexity by domain", svg, healthy, legend)


def norm_figure(run: RunData) -> Figure | None:
    """Gradient norm over time, with the bound it is clipped to."""
    steps, norms = run.column("grad_norm")
    if not steps:
        return None
    positive = [(s, math.log(n)) for s, n in zip(steps, norms, strict=True) if n > 0 and math.isfinite(n)]
    series, legend = [Series("norm", steps, norms, 0, "faint")], []
    if positive:
        xs, logs = smooth([s for s, _ in positive], [v for _, v in positive], _window(positive))
        series.append(Series("smoothed", xs, [math.exp(v) for v in logs]))
        legend.append((0, "before clipping, smoothed", format_number(series[1].ys[-1])))
    note = ""
    bound = run.setting("optim", "clip_norm")
    if bound:
        series.append(Series("clip_norm", [steps[0], steps[-1]], [bound, bound], 1, "rule"))
        clipped = sum(norm > bound for norm in norms)
        legend.append((1, "clip_norm", format_number(bound)))
        note = f"{clipped} of {len(norms)} recorded steps ({format_percent(clipped / len(norms))}) were clipped."
    svg = line_chart(series, label="gradient norm over steps", y_label="global norm", log_y=True)
    healthy = (
        "Level or slowly drifting after the warm-up, spikes rare. Growth over hundreds of steps foretells divergence."
    )
    return Figure("Gradient norm", svg, healthy, legend, note)


def settled_norms(run: RunData) -> tuple[list[float], str]:
    """Positive norms of the recorded steps after the warm-up (all of them where that leaves fewer than 8), and
    which steps these are, in words."""
    warmup = run.setting("optim", "warmup_steps") or 0
    pairs = [(s, n) for s, n in zip(*run.column("grad_norm"), strict=True) if n > 0 and math.isfinite(n)]
    late = [norm for step, norm in pairs if step > warmup]
    if warmup and len(late) >= 8:
        return late, "recorded steps after warm-up"
    return [norm for _, norm in pairs], "recorded steps"


def norm_distribution_figure(run: RunData) -> Figure | None:
    """Histogram of the gradient norm against the log-normal law with the same log-moments."""
    norms, which = settled_norms(run)
    fit = fit_log_normal(norms)
    if fit is None:
        return None
    svg = histogram(norms, fit.density, label="distribution of the gradient norm", x_label="global norm, log scale")
    legend = [(0, which, str(fit.count)), (1, "log-normal fit", "")]
    healthy = (
        "The articles expect log-normal norms: bars along the curve. A second hump or a heavy right tail "
        "points to bad batches or instability; a loss that still falls fast drifts and widens it."
    )
    return Figure("Distribution of the gradient norm", svg, healthy, legend, _fit_words(fit))


def _fit_words(fit: LogNormalFit) -> str:
    verdict = "follow" if fit.follows else "do not follow"
    return (
        f"Median {format_number(fit.median)}, deviation of the logarithm {format_number(fit.sigma)}, its skewness "
        f"{format_number(fit.skew)}. Kolmogorov-Smirnov distance {format_number(fit.distance)} against a 5 % bound of "
        f"{format_number(fit.bound)}: the norms {verdict} a log-normal law."
    )


def loss_scale_figure(run: RunData) -> Figure | None:
    """Loss scale over time and the steps that were skipped; None where the scale never differs from 1."""
    steps, scales = run.column("loss_scale")
    skips = run.kinds("overflow", "skip")
    if not steps or (set(scales) == {1.0} and not skips):
        return None
    marks = [Mark(float(e["step"]), str(e.get("message", e["kind"])), 5) for e in skips if _finite(e.get("step"))]
    series = [Series("scale", steps, scales, 4, "step")]
    svg = line_chart(
        series, label="loss scale over steps", y_label="loss scale", log_y=True, binary=True, marks=marks, size=LOW
    )
    legend = [(4, "loss scale", format_number(scales[-1])), (5, "skipped steps", str(len(skips)))]
    healthy = "Doubles after each clean window and halves at a rare overflow. A fall without recovery is divergence."
    return Figure("Loss scale and skipped steps", svg, healthy, legend)


def rate_figure(run: RunData) -> Figure | None:
    """Learning rate over time."""
    steps, rates = run.column("lr")
    if not steps:
        return None
    svg = line_chart(
        [Series("lr", steps, rates, 2)], label="learning rate over steps", y_label="learning rate", zero=True
    )
    healthy = "Rises through the warm-up and falls as scheduled."
    return Figure("Learning rate", svg, healthy, [(2, "learning rate, last", format_number(rates[-1]))])


def throughput_figure(run: RunData) -> Figure | None:
    """Tokens a second, with the plan's prediction."""
    steps, speeds = run.column("tokens_per_s")
    if not steps:
        return None
    series = [Series("measured", steps, speeds, 0)]
    legend = [(0, "measured, median", f"{format_number(_median(speeds))} tokens/s")]
    planned = (run.plan or {}).get("tokens_per_s")
    if _finite(planned):
        series.append(Series("planned", [steps[0], steps[-1]], [planned, planned], 1, "rule"))
        legend.append((1, "planned", f"{format_number(planned)} tokens/s"))
    svg = line_chart(series, label="tokens a second", y_label="tokens/s", zero=True, y_format="count")
    healthy = "Level. The first steps compile and are slow; dips are evaluations, checkpoints or other programs."
    return Figure("Throughput", svg, healthy, legend)


def wait_figure(run: RunData) -> Figure | None:
    """Share of the step time spent waiting for data."""
    steps, shares = run.column("wait_share")
    if not steps:
        return None
    svg = line_chart(
        [Series("waiting", steps, shares, 3)],
        label="share of time waiting for data",
        y_label="of the step",
        zero=True,
        y_format="percent",
    )
    legend = [(3, "waiting for data, median", format_percent(_median(shares)))]
    return Figure("Waiting for data", svg, "Under 1 %. More means that the disk or the packing is too slow.", legend)


def memory_figure(run: RunData) -> Figure | None:
    """Measured bytes by owner over time."""
    rows = [row for row in run.steps if isinstance(row.get("memory"), dict)]
    if len(rows) < 2:
        return None
    xs = [float(row["step"]) for row in rows]
    owners = [owner for owner in OWNERS if any(row["memory"].get(owner) for row in rows)]
    series = [Series(o, xs, [float(row["memory"].get(o) or 0) for row in rows], OWNERS.index(o)) for o in owners]
    svg = stacked_area(series[::-1], label="memory by owner over steps", y_label="peak bytes")
    legend = [(s.colour, s.name, "") for s in series]
    healthy = "Flat after the first steps. A steady rise is a leak, or an allocator that fragments."
    return Figure("Memory by owner over time", svg, healthy, legend)


def memory_bars_figure(run: RunData) -> Figure | None:
    """Planned against measured bytes by owner, at the peak of each."""
    plan = run.plan or {}
    planned = (plan.get("phases") or {}).get(plan.get("step_phase") or plan.get("peak_phase")) or {}
    measured = peak_memory_row(run, with_owners=True) or peak_memory_row(run) or {}
    owned = measured.get("memory") or {}
    if not planned and not owned:
        return None
    rows: list[tuple[str, list[float | None]]] = [
        (owner, [planned.get(owner, 0) if planned else None, owned.get(owner, 0) if owned else None])
        for owner in OWNERS
    ]
    totals = [sum(planned.values()) if planned else None, measured.get("memory_bytes")]
    svg = bar_chart([*rows, ("peak", totals)], ("planned", "measured"), label="memory by owner", value_format="bytes")
    note = ""
    if _finite(totals[0]) and _finite(totals[1]) and totals[1]:
        error = (totals[0] - totals[1]) / totals[1]
        note = f"The plan was {format_percent(abs(error))} {'above' if error >= 0 else 'below'} the measured peak."
    healthy = "Planned within 10 % of measured. The plan counts what an allocator keeps after a free under other."
    return Figure("Memory at the peak", svg, healthy, [(0, "planned", ""), (1, "measured", "")], note)


def peak_memory_row(run: RunData, with_owners: bool = False) -> dict[str, Any] | None:
    """The metrics row with the largest peak, of those that split it by owner if asked; None where there is none."""
    rows = [row for row in run.steps if _finite(row.get("memory_bytes"))]
    rows = [row for row in rows if isinstance(row.get("memory"), dict)] if with_owners else rows
    return max(rows, key=lambda row: row["memory_bytes"], default=None)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _window(values: Sequence[object]) -> int:
    """Records that one smoothed point rests on: a tenth of them, five at least."""
    return max(5, len(values) // 10)

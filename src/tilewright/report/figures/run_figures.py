"""The report's charts: which numbers of a run go into which picture, and how the picture is read.

Each function gives a `Figure`, or None where its numbers were not recorded. Whether a curve is good or bad is said by
the rules of `report.verdict`, never by the words here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tilewright.core.units import format_bits, format_perplexity, format_share, perplexity
from tilewright.report.run_data.clean_rows import Row, number
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.run_data.run_numbers import (
    compressor_lines,
    domain_bits,
    domain_losses,
    held_out_bits,
    held_out_losses,
    not_finite,
    part_note,
    peak_memory_row,
    phase_of,
    planned_peak,
    settled_norms,
    skipped_steps,
)
from tilewright.report.run_data.stats import LogNormalFit, fit_log_normal, smooth
from tilewright.report.svg.axes import format_number, from_log
from tilewright.report.svg.charts import Mark, Series, bar_chart, histogram, line_chart, stacked_area

WIDE, LOW = (1080, 320), (1080, 210)
WIDE_RANGE = 20.0
"""Largest over smallest loss from which the axis is logarithmic."""
LARGEST_EXPONENT = 100.0
"""Held-out loss above which the loss is drawn in place of the perplexity, 3e43."""
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
    "mix": 4,
    "mix_refused": 7,
}
"""Kinds of events drawn on the loss chart, and their colours."""
_RULES = {"gzip": 6, "xz": 7}
"""Colours of the compressors' lines, which no domain has."""


@dataclass(frozen=True)
class Figure:
    """A chart of the report with its words.

    `legend`: (colour, name, latest value). `note`: what was measured too. `reading`: how the picture is read.
    """

    title: str
    svg: str
    reading: str
    legend: Sequence[tuple[int, str, str]] = ()
    note: str = ""


def loss_figure(run: RunData) -> Figure | None:
    """Run figure of training loss, raw and smoothed, held-out loss, and the moments where something changed."""
    steps, losses = run.column("loss")
    if not steps:
        return None
    # A run that diverges would press the rest flat: a logarithmic axis, for all lines.
    held = held_out_losses(run)
    wide = _is_wide([*losses, *(loss for _, loss in held)])
    smoothed = _smooth(steps, losses, wide)
    series = [Series("loss", steps, losses, 0, "faint"), smoothed]
    legend = [(0, f"training, smoothed over {_window(losses)} records", format_number(smoothed.ys[-1]))]
    if held:
        series.append(Series("held out", [step for step, _ in held], [loss for _, loss in held], 1, "dots"))
        # The number beside the chart is of all domains, where there was such an evaluation.
        newest = (held_out_losses(run, "eval_all") or held)[-1][1]
        legend.append((1, "held out, all domains", format_number(newest)))
    marks = [
        Mark(step, f"step {step:g}: {e['kind']}: {e.get('message', '')}", MARKED[e["kind"]])
        for e in run.kinds(*MARKED)
        if (step := number(e.get("step"))) is not None
    ]
    kinds = sorted({e["kind"] for e in run.kinds(*MARKED)})
    legend += [(MARKED[kind], kind.replace("_", " "), f"{len(run.kinds(kind))} x") for kind in kinds]
    y_label = "nats per token, log scale" if wide else "nats per token"
    svg = line_chart(series, label="loss over steps", y_label=y_label, log_y=wide, marks=marks, size=WIDE)
    reading = (
        "A loss usually falls steeply, then ever more slowly, with the held-out dots close to the line. A gap that "
        "widens comes from memorising, a jump that does not come back within tens of steps from divergence."
    )
    notes = _left_out(not_finite(run, "loss"), len(run.steps), "losses"), part_note(run) if held else ""
    return Figure("Loss", svg, reading, legend, " ".join(filter(None, notes)))


def domain_colours(run: RunData) -> dict[str, int]:
    """The colour of each domain that was evaluated, the same in all charts: 1 to 5. Colour 0 is that of all domains
    together."""
    return {domain: 1 + i % 5 for i, domain in enumerate(domain_losses(run))}


def perplexity_figure(run: RunData) -> Figure | None:
    """Run figure of the held-out perplexity of each domain."""
    domains = {name: points for name, points in domain_losses(run).items() if points}
    if not domains:
        return None
    colours = domain_colours(run)
    drawable = max(loss for points in domains.values() for _, loss in points) <= LARGEST_EXPONENT
    drawn = perplexity if drawable else float
    series = [
        Series(domain, [step for step, _ in points], [drawn(loss) for _, loss in points], colours[domain])
        for domain, points in domains.items()
    ]
    ended = domain_losses(run, "eval_all")
    newest = {domain: (ended.get(domain) or points)[-1][1] for domain, points in domains.items()}
    legend = [(colours[domain], domain, format_perplexity(loss)) for domain, loss in newest.items()]
    y_label = "perplexity" if drawable else "nats per token (perplexity is e to their power)"
    svg = line_chart(series, label="held-out perplexity by domain", y_label=y_label, log_y=True)
    reading = "A domain that rises while the others fall is being forgotten: more of its text (data.weights) helps."
    return Figure("Held-out perplexity by domain", svg, reading, legend, part_note(run))


def bits_figure(run: RunData) -> Figure | None:
    """Run figure of held-out bits per byte, of all text and by domain; None where targets are not text."""
    points = held_out_bits(run)
    if not points:
        return None
    domains = domain_bits(run)
    by_name = {"all": points} | (domains if len(domains) > 1 else {})
    colours = {"all": 0} | domain_colours(run)
    series = [
        Series(name, [step for step, _ in found], [bits for _, bits in found], colours[name])
        for name, found in by_name.items()
    ]
    ended = {"all": held_out_bits(run, "eval_all")} | domain_bits(run, "eval_all")
    legend = [(colours[name], name, format_bits((ended.get(name) or found)[-1][1])) for name, found in by_name.items()]
    steps = [step for step, _ in points]
    for name, bits in compressor_lines(run).items():
        series.append(Series(f"{name} -9", [steps[0], steps[-1]], [bits, bits], _RULES[name], "rule"))
        legend.append((_RULES[name], f"{name} -9", format_bits(bits)))
    svg = line_chart(series, label="held-out bits per byte", y_label="bits per byte")
    reading = (
        "The size of the held-out text if the model compressed it: independent of the tokenizer, so comparable between "
        "runs. Below the lines of gzip and xz a model has learned more than repetition."
    )
    return Figure("Held-out bits per byte", svg, reading, legend, part_note(run))


def norm_figure(run: RunData) -> Figure | None:
    """Run figure of the gradient norm over time, with the bound it is clipped to."""
    steps, norms = run.column("grad_norm")
    if not steps:
        return None
    series, legend = [Series("norm", steps, norms, 0, "faint")], []
    positive = [(step, norm) for step, norm in zip(steps, norms, strict=True) if norm > 0]
    if positive:
        series.append(_smooth([step for step, _ in positive], [norm for _, norm in positive], log=True))
        legend.append((0, "before clipping, smoothed", format_number(series[1].ys[-1])))
    note = _left_out(not_finite(run, "grad_norm"), len(run.steps), "norms")
    bound = run.number_setting("optim", "clip_norm")
    if bound:
        series.append(Series("clip_norm", [steps[0], steps[-1]], [bound, bound], 1, "rule"))
        legend.append((1, "clip_norm", format_number(bound)))
    svg = line_chart(series, label="gradient norm over steps", y_label="global norm", log_y=True)
    reading = "After the warm-up a norm usually drifts slowly. Growth over hundreds of steps foretells divergence."
    return Figure("Gradient norm", svg, reading, legend, note)


def norm_distribution_figure(run: RunData) -> Figure | None:
    """Run figure: histogram of the gradient norm against the log-normal law with the same log-moments."""
    norms, which = settled_norms(run)
    fit = fit_log_normal(norms)
    if fit is None:
        return None
    svg = histogram(norms, fit.density, label="distribution of the gradient norm", x_label="global norm, log scale")
    legend = [(0, which, str(fit.count)), (1, "log-normal fit", "")]
    reading = (
        "The articles expect log-normal norms: bars along the curve. A second hump or a heavy right tail "
        "points to bad batches or instability; a loss that still falls fast drifts and widens it."
    )
    return Figure("Distribution of the gradient norm", svg, reading, legend, _fit_words(fit))


def _fit_words(fit: LogNormalFit) -> str:
    fits = "follow" if fit.follows else "do not follow"
    return (
        f"Median {format_number(fit.median)}, deviation of the logarithm {format_number(fit.sigma)}, its skewness "
        f"{format_number(fit.skew)}. Kolmogorov-Smirnov distance {format_number(fit.distance)} against a 5 % bound of "
        f"{format_number(fit.bound)}: the norms {fits} a log-normal law."
    )


def loss_scale_figure(run: RunData) -> Figure | None:
    """Run figure of the loss scale over time and the steps that were skipped; None where the scale never differs from
    1."""
    steps, scales = run.column("loss_scale")
    skipped = skipped_steps(run)
    if not steps or (set(scales) == {1.0} and not skipped):
        return None
    marks = [
        Mark(float(row["step"]), f"step {row['step']}: {row['skipped']}", 5)
        for row in run.steps
        if row.get("skipped") is not None
    ]
    series = [Series("scale", steps, scales, 4, "step")]
    svg = line_chart(
        series, label="loss scale over steps", y_label="loss scale", log_y=True, binary=True, marks=marks, size=LOW
    )
    legend = [(4, "loss scale", format_number(scales[-1])), (5, "skipped steps", str(skipped))]
    reading = "The scale doubles after each clean window and halves at an overflow. It is 1 where nothing needs it."
    return Figure("Loss scale and skipped steps", svg, reading, legend)


def rate_figure(run: RunData) -> Figure | None:
    """Run figure of the learning rate over time."""
    steps, rates = run.column("lr")
    if not steps:
        return None
    svg = line_chart(
        [Series("lr", steps, rates, 2)], label="learning rate over steps", y_label="learning rate", zero=True
    )
    reading = "What the schedule asked for: it rises through the warm-up and falls at the end."
    return Figure("Learning rate", svg, reading, [(2, "learning rate, last", format_number(rates[-1]))])


def throughput_figure(run: RunData) -> Figure | None:
    """Run figure of tokens a second, with the plan's prediction."""
    steps, speeds = run.column("tokens_per_s")
    if not steps:
        return None
    series = [Series("measured", steps, speeds, 0)]
    legend = [(0, "measured, median", f"{format_number(median(speeds))} tokens/s")]
    planned = run.planned("tokens_per_s")
    if planned is not None:
        series.append(Series("planned", [steps[0], steps[-1]], [planned, planned], 1, "rule"))
        legend.append((1, "planned", f"{format_number(planned)} tokens/s"))
    if (corrected := run.corrected("tokens_per_s")) is not None:
        series.append(Series("planned, corrected", [steps[0], steps[-1]], [corrected, corrected], 2, "rule"))
        legend.append((2, "planned, corrected beside the first steps", f"{format_number(corrected)} tokens/s"))
    svg = line_chart(series, label="tokens per second", y_label="tokens/s", zero=True, y_format="count")
    reading = "The first steps compile and are slow; dips are evaluations, checkpoints or other programs."
    return Figure("Throughput", svg, reading, legend)


def wait_figure(run: RunData) -> Figure | None:
    """Run figure of the share of the step time spent waiting for data."""
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
    legend = [(3, "waiting for data, median", format_share(median(shares)))]
    reading = "The first step waits for the first batch. Waiting later means that the disk or the packing is too slow."
    return Figure("Waiting for data", svg, reading, legend)


def memory_figure(run: RunData) -> Figure | None:
    """Run figure of measured bytes by owner over time."""
    rows = [row for row in run.steps if "memory" in row]
    if len(rows) < 2:
        return None
    xs = [float(row["step"]) for row in rows]
    owners = [owner for owner in OWNERS if any(row["memory"].get(owner) for row in rows)]
    if not owners:
        return None
    series = [Series(o, xs, [float(row["memory"].get(o) or 0) for row in rows], OWNERS.index(o)) for o in owners]
    svg = stacked_area(series[::-1], label="memory by owner over steps", y_label="peak bytes")
    legend = [(s.colour, s.name, "") for s in series]
    reading = "After the first steps the peak is usually flat. A steady rise is a leak, or an allocator that fragments."
    return Figure("Memory by owner over time", svg, reading, legend)


def memory_bars_figure(run: RunData) -> Figure | None:
    """Run figure of planned against measured bytes by owner, at the peak of each."""
    phase, planned = planned_peak(run)
    measured: Row = peak_memory_row(run, with_owners=True) or peak_memory_row(run) or {}
    owned: Mapping[str, float] = measured.get("memory") or {}
    if not planned and not owned:
        return None
    rows: list[tuple[str, list[float | None]]] = [
        (owner, [planned.get(owner, 0) if planned else None, owned.get(owner, 0) if owned else None])
        for owner in OWNERS
    ]
    totals = [sum(planned.values()) if planned else None, number(measured.get("memory_bytes"))]
    svg = bar_chart([*rows, ("peak", totals)], ("planned", "measured"), label="memory by owner", value_format="bytes")
    reading = "The plan counts what an allocator keeps after a free under other."
    names = [_at("planned", phase), _at("measured", phase_of(measured))]
    return Figure("Memory at the peak", svg, reading, [(0, names[0], ""), (1, names[1], "")])


def _at(what: str, phase: str) -> str:
    return f"{what}, at {phase}" if phase else what


def _smooth(steps: Sequence[float], values: Sequence[float], log: bool) -> Series:
    """A smooth curve in run figures through a tenth of the records at a time; by their logarithms where all are
    positive and `log`."""
    xs, ys = smooth(steps, [math.log(value) for value in values] if log else values, _window(values))
    ys = [from_log(y) for y in ys] if log else ys
    low, high = min(values), max(values)  # a line through a jump goes beyond what was measured
    return Series("smoothed", xs, [min(max(y, low), high) for y in ys])


def _is_wide(values: Sequence[float]) -> bool:
    """True where a curve of run figures needs a logarithmic axis: a straight one would show its jump alone."""
    return min(values) > 0 and max(values) / min(values) >= WIDE_RANGE


def _left_out(count: int, of: int, what: str) -> str:
    return f"{count:,} of {of:,} recorded {what} are not finite, and not drawn." if count else ""


def _window(values: Sequence[object]) -> int:
    """The number of records that a point of a smoothed curve averages: a tenth of them, five at least."""
    return max(5, len(values) // 10)

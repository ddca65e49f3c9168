"""The measured pipeline of a run, from `pipeline.json`: a step as bars by rank, idle time by cause, the cost model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.units import format_share
from tilewright.parallel.pipeline.balance.measured_step import MeasuredStep, RankStep
from tilewright.parallel.pipeline.balance.replay import CAUSES, Pass
from tilewright.report.figures.run_figures import Figure
from tilewright.report.run_data.clean_rows import number
from tilewright.report.run_data.collect_run import RunData
from tilewright.report.svg.charts import Series, line_chart
from tilewright.report.svg.gantt import TimedBar, gantt_chart

_COLOURS = {"forward": 0, "backward": 1, "backward of inputs": 1, "backward of weights": 2}
_PARTS = {"gradients": 4, "update": 5}
_LEGEND = (
    (0, "forward", ""),
    (1, "backward, or of inputs", ""),
    (2, "backward of weights", ""),
    (4, "gradients summed and clipped", ""),
    (5, "update", ""),
)
_MOST_BARS = 6000


@dataclass(frozen=True)
class PipelineView:
    """Figure and tables of a measured pipeline on the report's page."""

    figures: Sequence[Figure]
    causes: Sequence[tuple[str, Sequence[str]]]
    """Idle time by cause: a name, and a share for each step of `steps`."""
    steps: Sequence[str]
    model: Sequence[tuple[str, str]]
    """Coefficients of the cost model, and how well it says what a step takes."""


def pipeline_view(run: RunData) -> PipelineView | None:
    """The figure of a run's pipeline with stages; None where nothing was measured, or the file is not as `train` writes
    it."""
    found = run.pipeline
    if found is None:
        return None
    try:
        shown = _different(found["first"], found["last"])
        figures = [_gantt(step) for step in shown]
        figures += _history(found["history"])
        causes = [(name, [format_share(step["causes"][name]) for step in shown]) for name in CAUSES]
        causes.append(("all", [format_share(step["idle"]) for step in shown]))
        return PipelineView(figures, causes, [f"step {step['step']}" for step in shown], _model(found["model"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _different(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [first] if first["step"] == last["step"] else [first, last]


def _gantt(step: Mapping[str, Any]) -> Figure:
    measured = MeasuredStep.from_json(step["ranks"])
    end_s = max(part.begin_s + part.seconds for rank in measured.ranks for part in (*rank.passes, *rank.parts))
    rows = [(f"rank {number}", _bars(rank)) for number, rank in enumerate(measured.ranks)]
    bars = sum(len(of_rank) for _, of_rank in rows)
    while sum(len(of_rank) for _, of_rank in rows) > _MOST_BARS and len(rows) > 1:
        rows = rows[:-1]
    left_out = "" if len(rows) == len(measured.ranks) else f"; of {len(measured.ranks)} ranks the first {len(rows)}"
    svg = gantt_chart(rows, label=f"passes of step {step['step']} by rank", end_s=end_s)
    reading = (
        f"Bars are passes as measured, numbers are micro-batches; what is empty is idle time: "
        f"{format_share(step['idle'])} of the ranks' time from the first pass to the last one."
    )
    title = f"Pipeline, step {step['step']}"
    return Figure(title, svg, reading, _LEGEND, f"{bars} parts of {step['microbatches']} micro-batches{left_out}")


def _bars(rank: RankStep) -> list[TimedBar]:
    passes = [
        TimedBar(_COLOURS[one.action], one.begin_s, one.seconds, str(one.microbatch + 1), _words(one))
        for one in rank.passes
    ]
    parts = [
        TimedBar(_PARTS.get(one.name, 7), one.begin_s, one.seconds, "", f"{one.name}, {1e3 * one.seconds:.4g} ms")
        for one in rank.parts
    ]
    return [*passes, *parts]


def _words(one: Pass) -> str:
    at = f"stage {one.stage + 1}, micro-batch {one.microbatch + 1}"
    return f"{one.action}, {at}, {1e3 * one.seconds:.4g} ms from {1e3 * one.begin_s:.4g} ms on"


def _history(rows: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Draw the pipeline's idle share by step, if there is more than one step."""
    if len(rows) < 2:
        return []
    steps = [float(row["step"]) for row in rows]
    series = [Series("idle", steps, [float(row["idle"]) for row in rows], 3)]
    series += [
        Series(name, steps, [float(row["causes"][name]) for row in rows], colour, "faint")
        for colour, name in enumerate(CAUSES[:3])
    ]
    legend = [(3, "idle", format_share(series[0].ys[-1]))]
    legend += [(one.colour, one.name, format_share(one.ys[-1])) for one in series[1:]]
    svg = line_chart(series, label="idle share of the pipeline", y_label="share of the ranks' time", zero=True)
    reading = "Causes are told apart by running the measured passes again on paper, without one of them at a time."
    return [Figure("Idle time of the pipeline", svg, reading, legend)]


def _model(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(name, f"{1e6 * seconds:.4g} us") for name, seconds in found["seconds"].items()]
    rows.append(("ranks' speeds", ", ".join(f"{speed:.2f}" for speed in found["speeds"])))
    error = number(found.get("error"))
    rows.append(("mean error of the last measured step", "not known" if error is None else format_share(error)))
    return rows

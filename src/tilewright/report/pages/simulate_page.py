"""Simulated steps as one HTML page: what levers bring, idle time by cause, the time of each rank, activations it holds.

Made of the same charts and style sheet as the report of a run; opens offline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tilewright.core.units import format_seconds, format_share
from tilewright.planner.simulate.describe_steps import (
    ABOUT,
    LADDER_COLUMNS,
    causes_row,
    ladder_row,
    ladder_verdict,
    setting_of,
)
from tilewright.planner.simulate.ladder import Rung
from tilewright.planner.simulate.mesh.mesh_setting import counted
from tilewright.planner.simulate.schedule_formulas import Failures
from tilewright.planner.simulate.simulated_step import CAUSES, SimulatedStep
from tilewright.report.figures.run_figures import Figure
from tilewright.report.summary import SummaryCard
from tilewright.report.svg.charts import Series, line_chart
from tilewright.report.svg.gantt import GanttRow, dense_gantt
from tilewright.report.template import fill

_COLOURS = {"F": 0, "B": 1, "I": 1, "W": 2}
_LEGEND = (
    (0, "forward", ""),
    (1, "backward, or gradient of the input", ""),
    (2, "gradients of weights", ""),
    (4, "sum of gradients", ""),
    (5, "optimizer", ""),
    (3, "what decides how long it takes", ""),
)
_MOST_ON_PATH = 2000
_MOST_RANKS = 256


@dataclass(frozen=True)
class PageTable:
    """A table of the page of simulated steps."""

    title: str
    lead: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[str] = frozenset()
    """Columns of words, beside the first one: to the left, and wrapped. Others are numbers."""


def render_simulation(rungs: Sequence[Rung], failures: Failures | None = None) -> str:
    """The page of simulated steps as HTML text.

    Args:
        rungs: of a ladder, or the one case; charts are of the first step of each.
        failures: of the run, for its goodput.
    """
    shown = [rung for rung in rungs if rung.steps]
    last = shown[-1]
    tables = [_causes(shown)]
    if len(rungs) > 1:
        lead = "Each line has what is above it too; schedules replace each other. Steps: medians; least to greatest."
        tables.insert(0, PageTable("Levers", lead, LADDER_COLUMNS, [ladder_row(rung, rungs[0]) for rung in rungs]))
    return fill(
        "simulate.html",
        kind="simulate",
        setting=setting_of(last.case),
        verdict=ladder_verdict(rungs),
        cards=[*_cards(last), *([] if failures is None else [_goodput(failures)])],
        tables=tables,
        heading="Time of each rank in the first step",
        figures=[*(step_gantt(rung.name, rung.steps[0]) for rung in shown), _memory(last)],
        notes=ABOUT,
    )


def _goodput(failures: Failures) -> SummaryCard:
    every = f"a failure every {format_seconds(failures.every_s)}, {format_seconds(failures.recover_s)} to recover"
    return SummaryCard("Goodput", format_share(failures.goodput), every)


def _cards(rung: Rung) -> list[SummaryCard]:
    step = rung.steps[0]
    exposed = median(one.exposed for one in rung.steps)
    return [
        SummaryCard("Step", format_seconds(rung.seconds), f"{counted(len(rung.steps), 'step')}, the median"),
        SummaryCard("Idle", format_share(median(rung.idle)), "of the ranks' time, the median"),
        SummaryCard("Exposed communication", format_share(exposed), "of the ranks' time, the median"),
        SummaryCard("Activations", f"{max(step.peaks):.1f}", "micro-batches, on the rank with most"),
        SummaryCard("Ranks", f"{step.num_ranks}", f"{step.costs.num_rows} rows of {step.table.num_ranks}"),
    ]


def _causes(shown: Sequence[Rung]) -> PageTable:
    lead = "The step is simulated again with one cause after the other; each has what it adds. Means over the steps."
    return PageTable("Idle time by cause", lead, ["", *CAUSES, "all"], [causes_row(rung) for rung in shown])


def step_gantt(name: str, step: SimulatedStep, left_out: str = "") -> Figure:
    """Draw the time of each rank in a simulated step as a Gantt chart.

    Args:
        name: of the figure.
        step: that is drawn.
        left_out: a sentence on what of a step is not in it.
    """
    order = [(row, rank) for row in range(step.costs.num_rows) for rank in range(step.table.num_ranks)]
    drawn = order[:_MOST_RANKS]
    rows = [_row(step, row, rank) for row, rank in drawn]
    line = {place: number for number, place in enumerate(drawn)}
    path = [
        (line[row, place[0]], _span(step, row, place)) for row, place in step.critical_path() if (row, place[0]) in line
    ]
    svg = dense_gantt(
        rows,
        label=f"time of each rank: {name}",
        end_s=step.seconds,
        path=path if len(path) <= _MOST_ON_PATH else (),
    )
    more = "" if len(drawn) == len(order) else f" The first {len(drawn)} of {len(order)} ranks."
    more += f" {left_out}" if left_out else ""
    reading = f"Rows of the pipeline one after the other, each from its first rank to its last; empty: idle.{more}"
    note = f"{format_seconds(step.seconds)}, {format_share(step.idle)} idle"
    return Figure(name, svg, reading, _LEGEND, note)


def _span(step: SimulatedStep, row: int, place: tuple[int, int]) -> tuple[float, float]:
    times = step.timeline.rows[row][place[0]][place[1]]
    return times.begin_s, times.end_s


def _row(step: SimulatedStep, row: int, rank: int) -> GanttRow:
    bars: dict[int, list[tuple[float, float]]] = {}
    for slot, times in zip(step.table.rows[rank], step.timeline.rows[row][rank], strict=True):
        begin = times.begin_s
        for one in slot:
            end = begin + step.costs.passes.seconds(row, rank, (one,))
            bars.setdefault(_COLOURS[one.kind], []).append((begin, end))
            begin = end
    if step.costs.reduce_s:
        bars[4] = [(step.summed_s[rank] - step.costs.reduce_s, step.summed_s[rank])]
    if step.costs.optimizer_s:
        bars[5] = [(max(step.summed_s), step.seconds)]
    number = step.costs.world_rank(row, rank)
    busy = sum(end - begin for colour, spans in bars.items() if colour != 4 for begin, end in spans)
    text = f"row {row}, idle {format_share(1 - busy / step.seconds)}, most activations {step.peaks[number]:.1f}"
    return GanttRow(f"rank {number}", bars, text)


def _memory(rung: Rung) -> Figure:
    step = rung.steps[0]
    worst = max(range(step.num_ranks), key=step.peaks.__getitem__)
    held = step.held(worst % step.costs.num_rows, worst // step.costs.num_rows)
    series = [Series(f"rank {worst}", [time for time, _ in held], [size for _, size in held], 0, "step")]
    svg = line_chart(
        series, label="activations over the step", y_label="micro-batches", x_label="seconds", zero=True,
        size=(1040, 260),
    )  # fmt: skip
    reading = "In micro-batches of mean cost through as many layers as a rank has on average."
    return Figure(f"Activations on rank {worst}, which holds most", svg, reading, [(0, f"rank {worst}", "")], rung.name)

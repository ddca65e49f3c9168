"""A plan as one HTML page: verdict, memory through a step, memory against time, the table.

Made of the same charts and style sheet as the report of a run; opens offline.
"""

from collections.abc import Sequence

from tilewright.core.units import format_bytes, format_count, format_seconds
from tilewright.planner.advice.describe_plan import timeline
from tilewright.planner.plan import Plan
from tilewright.report.figures.run_figures import Figure
from tilewright.report.summary import SummaryCard
from tilewright.report.svg.charts import Mark, Series, line_chart, stacked_area
from tilewright.report.template import fill

_OWNERS = ("parameters", "optimizer", "gradients", "activations", "work", "process")
_SIZE = (1040, 300)
_SEEN = 1.01
"""A peak that many times the greatest one that is drawn is another one."""


def render_plan(
    plan: Plan, curve: Sequence[Plan], table: tuple[list[str], list[list[str]]], changes: Sequence[str]
) -> str:
    """The page of a plan as HTML text.

    Args:
        plan: what is shown.
        curve: fastest plans at several device budgets; empty leaves the picture out.
        table: columns and rows of the layers' choices.
        changes: what would be faster, in words; empty leaves the section out.
    """
    columns, rows = table
    return fill(
        "plan.html",
        plan=plan,
        verdict=plan.verdict,
        cards=_cards(plan),
        figures=[_memory_figure(plan), *([_pareto_figure(curve, plan)] if curve else [])],
        columns=columns,
        rows=rows,
        changes=changes,
    )


def _cards(plan: Plan) -> list[SummaryCard]:
    setting, known = plan.setting, not plan.shape.unknown
    speed = f"{format_count(plan.tokens_per_s)} tokens/s" if known else ""
    found = [
        SummaryCard("Step", format_seconds(plan.step_s) if known else "not known", speed),
        SummaryCard(
            "Device", format_bytes(plan.peak_bytes), f"of {format_bytes(plan.budget.device)}, at {plan.peak_phase}"
        ),
    ]
    if plan.host:
        found.append(SummaryCard("Host", format_bytes(plan.host_bytes), f"of {format_bytes(plan.budget.host)}"))
    batches = "micro-batches" if setting.num_micro > 1 else "micro-batch"
    found.append(
        SummaryCard("Executor", setting.executor, f"{setting.num_micro} {batches} of {setting.micro_batch_size}")
    )
    found.append(SummaryCard("Optimizer", setting.moments, f"moments; master {setting.master}"))
    return found


def _memory_figure(plan: Plan) -> Figure:
    moments = timeline(plan)
    xs = [float(i) for i in range(len(moments))]
    series = [
        Series(owner, xs, [row[owner] for _, row in moments], i)
        for i, owner in enumerate(_OWNERS)
        if any(row[owner] for _, row in moments)
    ]
    svg = stacked_area(
        series, label="device memory through one step", y_label="device bytes", x_label="moment", size=_SIZE
    )
    names = [name for name, _ in moments]
    places = f"0 is load, {names.index('loss')} the loss; before it layers forward, behind it layers backward. "
    places += f"The budget is {format_bytes(plan.budget.device)}, of which {plan.recipe.plan.margin:.0%} stay free."
    if plan.peak_bytes > _SEEN * max(sum(row.values()) for _, row in moments):
        places += f" Not drawn: {plan.peak_phase}, with {format_bytes(plan.peak_bytes)}."
    return Figure("Device memory through one step", svg, places, [(one.colour, one.name, "") for one in series])


def _pareto_figure(curve: Sequence[Plan], plan: Plan) -> Figure:
    points = sorted((found.peak_bytes / 2**30, found.step_s) for found in curve)
    narrowed = [found for found in curve if found.narrowed]
    series = [Series("fastest plan", [x for x, _ in points], [y for _, y in points], 0)]
    legend, note = [(0, "fastest plan", ""), (1, "this plan", "")], "Each point is a plan of its own."
    note += " Dotted: the budget."
    if narrowed:
        sizes, times = [found.peak_bytes / 2**30 for found in narrowed], [found.step_s for found in narrowed]
        series.append(Series("other formats", sizes, times, 2, "dots"))
        legend.append((2, "with formats that change what is learned", ""))
        note += f" Formats of the optimizer that the recipe has not: {_told(narrowed)}."
    series.append(Series("this plan", [plan.peak_bytes / 2**30], [plan.step_s], 1, "dots"))  # above the others
    marks = [Mark(plan.budget.device / 2**30, f"budget {format_bytes(plan.budget.device)}")]
    svg = line_chart(
        series, label="seconds of a step against device memory", y_label="seconds per step", x_label="device GiB",
        marks=marks, zero=True, size=_SIZE,
    )  # fmt: skip
    return Figure("Memory against time", svg, note, legend)


def _told(narrowed: Sequence[Plan]) -> str:
    """Formats on the page of a plan, and from how many bytes to how many plans have them."""
    sizes: dict[str, list[float]] = {}
    for found in narrowed:
        sizes.setdefault(found.formats, []).append(found.peak_bytes)
    return "; ".join(
        f"{formats} with {format_bytes(min(found))}" + (f" to {format_bytes(max(found))}" if len(found) > 1 else "")
        for formats, found in sizes.items()
    )

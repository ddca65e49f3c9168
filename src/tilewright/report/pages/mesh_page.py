"""The best meshes of a search as one HTML page: the table, where the time of each goes, whose its bytes are, when each
rank of the fastest one with stages works, and where the numbers are from.

Made of the same charts and style sheet as the report of a run; opens offline.
"""

import re
from collections.abc import Sequence

from tilewright.core.units import format_bytes, format_count, format_seconds, format_share
from tilewright.planner.simulate.mesh.mesh_search import BestMeshes, MeshStep
from tilewright.planner.simulate.mesh.search_answer import COLUMNS, row_of, why_lost
from tilewright.report.figures.run_figures import Figure
from tilewright.report.pages.simulate_page import PageTable, step_gantt
from tilewright.report.summary import SummaryCard
from tilewright.report.svg.charts import bar_chart
from tilewright.report.svg.gantt import TimedBar, gantt_chart
from tilewright.report.template import fill

_WORDS = frozenset(("mesh", "schedule", "recomputation", "binds", "why", "option"))
_AROUND_NUMBERS = re.compile(r"(?<=\w) (?=\d)|(?<=\d) (?=%)")
_PARTS = ("computation", "recomputation", "communication", "update", "idle")


def render_meshes(found: BestMeshes, verdict: str, changes: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The page of a search's best meshes as HTML text.

    Args:
        found: at least one setting that fits.
        verdict: the answer in a sentence.
        changes: what would make it faster: cells of `describe.change_row`.
        notes: where rates are from, line by line.
    """
    best = found.best[0]
    tables = [
        PageTable(
            "The fastest meshes",
            _searched(found),
            COLUMNS,
            [[_bound(cell) for cell in row_of(*one)] for one in enumerate(found.best, 1)],
            _WORDS,
        )
    ]
    # Tables that say something only where there is a second mesh, or a change.
    if len(found.best) > 1:
        lost = [[str(place), why_lost(best, step)] for place, step in enumerate(found.best[1:], 2)]
        tables.append(PageTable("Why the others lost", "Beside the first one.", ("", "why"), lost, _WORDS))
    if changes:
        lead = "Settings of the recipe that change what is learned, each with the best mesh that it has then."
        tables.append(PageTable("What would be faster", lead, ("option", "tokens/s", "more", "mesh"), changes, _WORDS))
    return fill(
        "simulate.html",
        kind="plan --world",
        setting=f"{best.setting.sizes.world} GPUs",
        verdict=verdict,
        cards=_cards(best),
        tables=tables,
        heading="Time, bytes, and the work of each rank",
        figures=[_time(found), _bytes(found), *_gantt(found)],
        notes=notes,
    )


def _bound(text: str) -> str:
    """A bound cell on the page of meshes, whose numbers stay with what they count."""
    return _AROUND_NUMBERS.sub("\N{NO-BREAK SPACE}", text)


def _searched(found: BestMeshes) -> str:
    return f"Of {found.settings:,} settings; {found.simulated:,} were simulated, the others do not fit or are slower."


def _cards(best: MeshStep) -> list[SummaryCard]:
    return [
        SummaryCard("Step", format_seconds(best.seconds), f"{format_count(best.tokens_per_s)} tokens/s"),
        SummaryCard("MFU", format_share(best.mfu), "of the published peak"),
        SummaryCard("Memory", format_bytes(best.worst.peak), f"of {format_bytes(best.budget_bytes)} on the worst rank"),
        SummaryCard("Idle", format_share(best.idle), "of the ranks' time"),
        SummaryCard("Exposed communication", format_share(best.exposed), "of the ranks' time"),
    ]


def _time(found: BestMeshes) -> Figure:
    """Time on the page of meshes: of each setting the parts of its step, one behind the other."""
    rows = []
    for place, step in enumerate(found.best, 1):
        bars, begin = [], 0.0
        for colour, name in enumerate(_PARTS):
            seconds = step.parts[name] * step.seconds
            bars.append(TimedBar(colour, begin, seconds, name, f"{name}, {format_seconds(seconds)}"))
            begin += seconds
        rows.append((str(place), bars))
    longest = max(step.seconds for step in found.best)
    svg = gantt_chart(rows, label="seconds of a step by part", end_s=longest)
    reading = "Means over the ranks of a row, not in the order of time. Numbers are lines of the table."
    return Figure("Seconds of a step, by part", svg, reading, _legend(_PARTS))


def _bytes(found: BestMeshes) -> Figure:
    """Draw the bytes of each setting on the page of meshes, by owner: those of the rank that needs most."""
    names = [name for name in found.best[0].worst.owners if any(step.worst.owners[name] for step in found.best)]
    rows = [
        (f"{place}, {step.worst.peak_phase}", [step.worst.owners[name] for name in names])
        for place, step in enumerate(found.best, 1)
    ]
    svg = bar_chart(rows, names, label="bytes of the rank that needs most", value_format="bytes", width=1080)
    reading = f"At the phase with most bytes; of {format_bytes(found.best[0].budget_bytes)} in all."
    return Figure("Memory of the rank that needs most, by owner", svg, reading, _legend(names))


def _legend(names: Sequence[str]) -> list[tuple[int, str, str]]:
    return [(colour, name, "") for colour, name in enumerate(names)]


def _gantt(found: BestMeshes) -> list[Figure]:
    """Draw a Gantt chart on the page of meshes: the fastest setting with stages, one row of ranks."""
    for place, step in enumerate(found.best, 1):
        simulated = step.simulated
        if simulated is not None:
            return [step_gantt(f"{place}: {step.setting}", simulated, _not_drawn(step))]
    return []


def _not_drawn(step: MeshStep) -> str:
    """Parts of a step that are not drawn on the page of meshes, as its passes lack them."""
    drawn, whole = step.costs.simulated_count, step.setting.count
    passes = f"The first {drawn} of {whole} micro-batches, after which all take as long" if drawn < whole else "Passes"
    rest = "gathers, sums of gradients and the update are not drawn"
    return f"{passes}; {rest}: the whole step takes {format_seconds(step.seconds)}."

"""report.html: one file that opens offline, made from the run folder alone. Of a run whose step was simulated what was
measured is put beside that in plan.json.

No scripts, fonts or pictures from elsewhere: charts are inline SVG, the style sheet is inlined. Text from the
run (samples, paths, messages) is escaped by the template engine.
"""

import shlex
from pathlib import Path

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import DataError
from tilewright.core.json_text import from_json, to_json
from tilewright.report import summary, tables
from tilewright.report.figures import precision_figures, run_figures
from tilewright.report.figures.mixing_figure import mixing_figure
from tilewright.report.figures.pipeline_figure import pipeline_view
from tilewright.report.run_data import before_after, rank_rows, replan_table
from tilewright.report.run_data.collect_run import RunData, collect
from tilewright.report.run_data.energy_table import energy_view
from tilewright.report.run_data.exports_table import Exports
from tilewright.report.run_data.forecast_table import COLUMNS as FORECAST_COLUMNS
from tilewright.report.run_data.forecast_table import forecast_view, measured
from tilewright.report.run_data.run_numbers import state
from tilewright.report.run_data.traffic_table import traffic_view
from tilewright.report.template import fill
from tilewright.report.verdict.judge import Judgement, judge
from tilewright.report.verdict.rule import VerdictState

FIGURES = {
    "loss": run_figures.loss_figure,
    "bits": run_figures.bits_figure,
    "perplexity": run_figures.perplexity_figure,
    "mixing": mixing_figure,
    "norm": run_figures.norm_figure,
    "norm_distribution": run_figures.norm_distribution_figure,
    "loss_scale": run_figures.loss_scale_figure,
    "formats": precision_figures.map_figure,
    "underflow": precision_figures.underflow_figure,
    "sqnr": precision_figures.sqnr_figure,
    "rate": run_figures.rate_figure,
    "throughput": run_figures.throughput_figure,
    "wait": run_figures.wait_figure,
    "memory_bars": run_figures.memory_bars_figure,
    "memory": run_figures.memory_figure,
}


def write_report(run_dir: str | Path, run: RunData | None = None, judgement: Judgement | None = None) -> Path:
    """Write `report.html` into a run folder, whole or not at all; a report that is there is replaced.

    Args:
        run_dir: folder of a run, finished or not. Parts that are missing are said to be.
        run: what `collect` found there, if it has been read already.
        judgement: what `judge` says about it, if it has been asked already.

    Returns:
        Path of the report.

    Raises:
        DataError: there is no such folder, or it cannot be written.
    """
    folder = Path(run_dir)
    try:
        run = run or collect(folder)
        page = render(run, judgement)
        path = folder / "report.html"
        write_whole(path, page)
        _write_beside(run)
    except OSError as error:
        raise DataError(
            "Report cannot be written",
            got=str(error),
            need="the folder of a run, in which files can be made",
            try_="free disk space, or a copy of the folder that you may write to: tilewright report FOLDER",
            where=str(folder),
        ) from error
    return path


def _write_beside(run: RunData) -> None:
    """Write beside the page of a run measured beside simulated numbers, in the plan's file."""
    if run.plan is not None and isinstance(run.plan.get("simulated"), dict):
        path = run.path / "plan.json"
        plan = from_json(path.read_text(encoding="utf-8"))
        write_whole(path, to_json(plan | {"measured": measured(run)}, indent=1))


def render(run: RunData, judgement: Judgement | None = None) -> str:
    """The page of a run as HTML text; `judgement` is what `judge` says about it, if it has been asked already."""
    judgement, learned = judgement or judge(run), summary.learned(run)
    # What the run has no numbers for is None or empty, and the template leaves it out.
    return fill(
        "page.html",
        run=run,
        judgement=judgement,
        State=VerdictState,
        headline=judgement.headline(learned),
        also=judgement.also(),
        learned=learned,
        state=state(run),
        cards=summary.cards(run),
        figures={name: make(run) for name, make in FIGURES.items()},
        memory=tables.memory_table(run),
        tiers=tables.tier_rows(run),
        pipeline=pipeline_view(run),
        forecast=forecast_view(run),
        forecast_columns=FORECAST_COLUMNS,
        energy=energy_view(run),
        traffic=traffic_view(run),
        ranks=rank_rows.rank_rows(run),
        rank_columns=rank_rows.COLUMNS,
        ranks_summary=rank_rows.rank_summary(run),
        replanned=replan_table.decisions(run),
        replanned_summary=replan_table.summary(replan_table.decisions(run)),
        samples=before_after.samples(run),
        changes=before_after.changes(run),
        tasks=before_after.task_changes(run.tasks),
        precision=tables.precision_groups(run.precision),
        moves=precision_figures.move_rows(run),
        kernels=tables.kernel_rows(run.machine),
        events=tables.event_rows(run.events),
        data=tables.facts(run.data),
        machine=tables.facts(run.machine, skip=("kernels",)),
        exports=None if run.exports is None else Exports.of(run.exports, run.path),
        num_changed=tables.changed_settings(run),
        command=_command(run),
    )


def _command(run: RunData) -> str:
    """The command that repeats a run, shown on its page: the resolved recipe holds every setting."""
    return f"tilewright train {shlex.quote(str(run.path / 'run.toml'))} --run.name {shlex.quote(run.name + '-again')}"

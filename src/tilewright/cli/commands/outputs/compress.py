"""`tilewright compress`: a run or a model's folder cut, recovered and exported inside a loss budget, with controls."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewright.cli.commands.outputs.stage_commands import alone_in, folder_beside, page_behind, say_aside, write_page
from tilewright.cli.common import (
    LATEST,
    FiniteRange,
    PathName,
    RecipeCommand,
    echo,
    find_run,
    is_run,
    json_option,
    overrides,
    print_json,
    run_or_model,
    show_table,
    verbosity,
)

if TYPE_CHECKING:
    from tilewright.compress.budget.compress_run import Compression
    from tilewright.compress.budget.cut_candidates import CutPlan

PAGE = "compress.html"


@click.command(cls=RecipeCommand)
@click.argument("run", default=LATEST, metavar="[RUN]", callback=run_or_model)
@click.option(
    "--budget",
    default="1%",
    show_default=True,
    help="Largest relative rise of the held-out loss; of images, percentage points that are wrong.",
)
@click.option("--targets", help="int8, edge4, or targets of `export`. Default: int8,edge4,fp8; of images onnx.")
@click.option("--cut", "kinds", help="Units: ffn, heads, experts, ... Default: ffn,heads; of images channels.")
@click.option(
    "--importance",
    type=click.Choice(["l1", "activation", "taylor", "random"]),
    default="activation",
    show_default=True,
    help="Which units stay.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps of recovery, and of controls."
)
@click.option("--tries", type=click.IntRange(1), default=3, show_default=True, help="Cuts that are recovered at most.")
@click.option(
    "--goal", type=click.Choice(["bytes", "latency"]), default="bytes", show_default=True, help="What is made small."
)
@click.option(
    "--controls",
    type=click.Choice(["all", "equal", "none"]),
    default="all",
    show_default=True,
    help="Runs to compare with; equal: the run itself for as many more steps.",
)
@click.option("--no-refit", is_flag=True, help="Do not fit the layers behind a cut before recovery.")
@click.option("--out", type=PathName(), help="Folder of all stages. Default: RUN-compressed.")
@click.option("--time-limit", type=FiniteRange(1), default=600, show_default=True, help="Seconds per runtime.")
@click.option("--dry-run", is_flag=True, help="Measure each cut, print what would be tried, and train nothing.")
@json_option
@verbosity
@click.pass_context
def compress(
    ctx: click.Context,
    run: str,
    budget: str,
    targets: str | None,
    kinds: str | None,
    out: Path | None,
    time_limit: float,
    dry_run: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Cut, recover and export a run or a model inside a loss budget, with controls.

    RUN is a run folder or its name below `runs`; without it `runs/latest`. Or a folder of Hugging Face's layout, or a
    model of the hub, org/name: `--data.source FOLDER` and other settings say what it learns from, and how.

    Each cut is measured alone. Sets of cuts that could be within the budget are then tried by bisection: each is made,
    and trained with the run as its teacher; a larger one follows where the loss is within the budget, over the run and
    over the run with as many more steps, and a smaller one where it is not. The largest within the budget is kept.
    Artefacts are proven in their runtimes, and what they round away counts too. Each stage is a run folder below OUT;
    the same command continues where it was stopped. Exits with 3 where the budget is not reached.

    Of a run that classifies images the budget is in percentage points of held-out images, and recovery has no teacher.
    """
    from tilewright.compress.budget.compress_settings import DEFAULTS, CompressSettings

    asked["refit"] = not asked.pop("no_refit")
    usual = DEFAULTS.get(_task_of(run), DEFAULTS["causal_lm"])
    settings = CompressSettings.of(budget, targets or usual[0], kinds or usual[1], **asked)
    from tilewright.cli.load_run import open_to_compress, open_to_export
    from tilewright.compress.budget.compress_run import Compression
    from tilewright.compress.prove.consumer_process import ConsumerLimits

    limits = ConsumerLimits.of_this_machine(time_limit)
    source = open_to_compress(run, overrides(ctx))
    out = out or folder_beside(run, "compressed")
    with alone_in(out):
        compression = Compression(source, settings, out, open_to_export, say_aside, limits)
        if dry_run:
            _show_plans(compression, compression.plan(), as_json)
            return
        with page_behind(lambda: _write_page(compression, out)):
            compression.run()
    if as_json:
        print_json(compression.record)
        return
    from tilewright.report.pages.compress_page import verdict_of

    echo(verdict_of(compression.record))


def _task_of(name: str) -> str:
    """Task for `compress`: of a run; of a model's folder causal_lm."""
    from tilewright.core.config.load import load_recipe

    return load_recipe(find_run(name) / "run.toml", environ={}).recipe.model.task if is_run(name) else "causal_lm"


def _show_plans(compression: "Compression", plans: "list[CutPlan]", as_json: bool) -> None:
    if as_json:
        print_json(compression.record)
        return
    from tilewright.compress.budget.budget_rise import error_in_words
    from tilewright.compress.budget.stage_seconds import in_hours
    from tilewright.core.units import format_bytes, format_seconds

    whole = compression.record["parameters"]
    rows = [
        (
            plan.name,
            f"{100 * plan.rise:+.2f} % +- {error_in_words(plan.error)}",
            f"{row['parameters']:,}",
            format_bytes(4 * row["parameters"]),
            f"{plan.speed:.2f}x, {1000 * plan.speed * compression.record['seconds']:.2f} ms",
        )
        for plan, row in zip(plans, compression.record["plans"], strict=True)
    ]
    measure = "share that is wrong" if compression.record.get("points") else "loss"
    click.echo(f"{measure} {compression.record['loss']:.4f} of {whole:,} parameters; largest cut first")
    show_table(("cut", f"{measure} before recovery", "parameters", "FP32", "time of 32 tokens"), rows)
    stages = compression.record["time"]["predicted"]["stages"]
    show_table(("stage", "predicted"), [(name, format_seconds(seconds)) for name, seconds in stages.items()])
    echo(in_hours(compression.record["time"]))


def _write_page(compression: "Compression", out: Path) -> None:
    from tilewright.report.pages.compress_page import render_compression

    if compression.record.get("recovered"):
        write_page(out / PAGE, render_compression(compression.record))

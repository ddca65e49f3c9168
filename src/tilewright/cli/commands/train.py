"""`tilewright train`: a recipe, settings from the command line, the training loop, then verdict and report."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.common import RecipeCommand, gc_paused, overrides, recipe_argument, verbosity
from tilewright.core.config.change_recipe import in_own_folder
from tilewright.core.config.load import Loaded, load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.unused_settings import without_effect
from tilewright.core.env import ranks
from tilewright.core.errors import TilewrightError
from tilewright.core.log import say
from tilewright.core.memory_plan import plan_text

if TYPE_CHECKING:
    from tilewright.training.assemble import RunContext
    from tilewright.training.run import RunResult


@click.command(cls=RecipeCommand)
@recipe_argument
@click.option("--dry-run", is_flag=True, help="Run two steps, compare planned with measured, keep nothing.")
@verbosity
@click.pass_context
def train(ctx: click.Context, recipe: str, dry_run: bool) -> None:
    """Train a model from a recipe; continue where the run stopped.

    RECIPE is a TOML file or the name of a shipped recipe (tilewright init --list); without it the default.
    The run.toml of a run's folder continues the run in that folder.
    """
    loaded = in_own_folder(load_recipe(recipe, overrides(ctx)))
    for note in loaded.notes:
        say(f"note: {note}")
    train_and_judge(loaded, dry_run)


def train_and_judge(
    loaded: Loaded, dry_run: bool, on_setup: "Callable[[RunContext], None] | None" = None
) -> "RunResult":
    """`train` and judge: say the verdict, on a run that stopped on bad numbers too: it is the one to look at.

    Args:
        loaded: the recipe.
        dry_run: two steps that keep nothing.
        on_setup: see `training.session.train`.
    """
    _check_paths(loaded.recipe)
    with gc_paused():
        from tilewright.training.session import train as run_training  # torch, so only after the recipe is right

    begun: list[bool] = []
    try:
        result = run_training(loaded, dry_run=dry_run, on_setup=on_setup, on_begin=lambda: begun.append(True))
    except TilewrightError:
        if begun:  # else what is there is of an earlier command, and the error is all there is to say
            _conclude(loaded, dry_run)
        raise
    _conclude(loaded, dry_run)
    return result


def _check_paths(recipe: Recipe) -> None:
    """Check that what `train` is to read is there, before torch is imported, which takes seconds. The run finds the
    same errors.

    Raises:
        TilewrightError: a setting names a path where nothing is.
    """
    from tilewright.data.chat.load import template_source
    from tilewright.data.common.tokenizer_folder import tokenizer_at
    from tilewright.data.sources.path_purpose import check_sources
    from tilewright.models.folder.find_model import is_hub_name, teacher_at
    from tilewright.models.folder.json_file import read_json

    data, model, unread = recipe.data, recipe.model, without_effect(recipe)
    images = model.task == "image_classification"
    check_sources(data, images=images, unread=unread)
    is_folder = bool(model.path) and not is_hub_name(model.path)
    if is_folder:
        read_json(Path(model.path).expanduser())
    if data.tokenizer and "data.tokenizer" not in unread:
        tokenizer_at(data.tokenizer)
    if data.chat_template and data.format != "text" and (is_folder or not model.path):
        template_source(data.chat_template, model.path or data.tokenizer)
    if recipe.distill.teacher:
        teacher_at(recipe.distill.teacher)
    if recipe.memory.plan not in ("", "auto"):
        plan_text(Path(recipe.memory.plan).expanduser())


def _conclude(loaded: Loaded, dry_run: bool) -> None:
    """Conclude `train`: say the verdict on a run that has begun, on the first rank; where the recipe wants a report,
    write it and say where it is."""
    from tilewright.report.page import write_report
    from tilewright.report.run_data.collect_run import collect
    from tilewright.report.summary import learned
    from tilewright.report.verdict.judge import judge

    if ranks().rank:
        return
    recipe = loaded.recipe
    folder = Path(recipe.run.dir) / (recipe.run.name or loaded.name)
    if dry_run or not (folder / "metrics.jsonl").is_file():
        return
    data = collect(folder)
    judgement = judge(data)
    say(judgement.line(learned(data)))
    if recipe.log.report:
        say(f"report: {write_report(folder, data, judgement)}")

"""`tilewright plan`: bytes and seconds of a run before it runs, from shapes and measured ceilings alone."""

from pathlib import Path

import click

from tilewright.cli.common import RecipeCommand, json_option, overrides, print_json, recipe_argument, verbosity
from tilewright.core.config import Recipe
from tilewright.core.load import load_recipe
from tilewright.core.log import say


@click.command(cls=RecipeCommand)
@recipe_argument
@json_option
@verbosity
@click.pass_context
def plan(ctx: click.Context, recipe: str, as_json: bool) -> None:
    """Does a run fit, how fast will it be, what binds: before it runs.

    RECIPE is a TOML file or the name of a shipped recipe. Exits with 3 where the run does not fit.
    """
    loaded = load_recipe(recipe, overrides(ctx))
    from tilewright.core.hardware import detect_machine
    from tilewright.plan.ceilings import measure
    from tilewright.plan.cost import make_plan
    from tilewright.training.assemble import does_not_fit

    settings = loaded.recipe
    machine = detect_machine(settings.run.device)
    import torch

    torch.set_num_threads(settings.run.threads or machine.physical_cores)
    rates = measure(machine, progress=None if as_json else say)
    found = make_plan(settings, _vocab_size(settings), machine, rates)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(found.table())
    if not found.fits:
        raise does_not_fit(found)


def _vocab_size(recipe: Recipe) -> int:
    """Tokens of the tokenizer that the run would use; classes of an image folder."""
    if recipe.model.task == "image_classification":
        source = Path(recipe.data.source).expanduser()
        return max(1, sum(path.is_dir() for path in source.iterdir())) if source.is_dir() else 1
    if recipe.data.tokenizer:
        from tilewright.data.tokenizer import load_tokenizer

        return load_tokenizer(recipe.data.tokenizer).vocab_size
    return recipe.data.vocab_size

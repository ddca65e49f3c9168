"""`tilewright plan`: bytes and seconds of a run before it runs, from shapes and ceilings alone.

Without options the recipe as it is; with budgets or a machine, the joint plan (`cli.plan_joint`).
"""

from pathlib import Path
from typing import Any

import click

from tilewright.cli.common import RecipeCommand, json_option, overrides, print_json, recipe_argument, verbosity
from tilewright.cli.plan_joint import JointOptions, joint_plan
from tilewright.core.config import Recipe
from tilewright.core.env import quick_imports
from tilewright.core.load import load_recipe
from tilewright.core.log import say


@click.command(cls=RecipeCommand)
@recipe_argument
@json_option
@click.option("--device-memory", default="", metavar="SIZE", help="Memory of the device: decide everything within it.")
@click.option("--host-memory", default="", metavar="SIZE", help="Memory of the host, for what may lie there.")
@click.option(
    "--disk-memory", default="", metavar="SIZE", help="Space on the disk that a plan may use; none by default."
)
@click.option("--on", default="", metavar="NAME", help="Published numbers of h100, h200, a100, 4090 or b200.")
@click.option("--largest", is_flag=True, help="The deepest model of this shape that fits.")
@click.option("--why", default="", metavar="LAYER", help="Explain what was decided for one layer: layer.7")
@click.option("--compare", default="", metavar="OTHER", help="Another recipe, or a plan file, beside this one.")
@click.option("--out", default="", metavar="FILE", help="Write the plan as TOML.")
@click.option("--html", default="", metavar="FILE", help="Write a page with memory through a step and against time.")
@verbosity
@click.pass_context
def plan(ctx: click.Context, recipe: str, as_json: bool, **options: Any) -> None:
    """Does a run fit, how fast will it be, what binds: before it runs.

    RECIPE is a TOML file or the name of a shipped recipe. Exits with 3 where the run does not fit, with 6 where that is
    not known. With
    --device-memory, --host-memory or --on, decides for each kind of layers what lies where and what is kept, so that a
    step is fastest.
    """
    loaded = load_recipe(recipe, overrides(ctx))
    if loaded.recipe.model.path:
        from tilewright.training.run_data import check_rows

        check_rows(loaded.recipe)
    asked = JointOptions(**options)
    if asked.asked:
        joint_plan(loaded, overrides(ctx), asked, _vocab_size, as_json)
        return
    with quick_imports():
        import torch

        from tilewright.core.hardware import detect_machine
        from tilewright.plan.ceilings import measure
        from tilewright.plan.cost import make_plan
        from tilewright.training.refused import does_not_fit, not_known

    settings = loaded.recipe
    machine = detect_machine(settings.run.device)
    torch.set_num_threads(settings.run.threads or machine.physical_cores)
    rates = measure(machine, progress=None if as_json else say)
    found = make_plan(settings, _vocab_size(settings), machine, rates)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(found.table())
    if found.state == "does not fit":
        raise does_not_fit(found)
    if found.state == "not known":
        raise not_known(found)


def _vocab_size(recipe: Recipe) -> int:
    """Tokens of the tokenizer that the run would use; classes of an image folder."""
    if recipe.model.task == "image_classification":
        source = Path(recipe.data.source).expanduser()
        return max(1, sum(path.is_dir() for path in source.iterdir())) if source.is_dir() else 1
    from tilewright.data.tokenizer import load_tokenizer
    from tilewright.training.run_data import tokenizer_path

    path = tokenizer_path(recipe.model, recipe.data)
    return load_tokenizer(path).vocab_size if path else recipe.data.vocab_size

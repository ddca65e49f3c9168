"""`tilewright precision`: which matmuls of which layers to compute in FP8, found before a run by measuring."""

from pathlib import Path

import click

from tilewright.cli.common import (
    PathName,
    RecipeCommand,
    json_option,
    overrides,
    print_json,
    recipe_argument,
    verbosity,
)
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.core.json_text import to_json
from tilewright.core.log import say


@click.group(invoke_without_command=True)
@click.pass_context
def precision(ctx: click.Context) -> None:
    """Find the fastest precision for a recipe within a loss budget."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@precision.command(cls=RecipeCommand)
@recipe_argument
@click.option("--budget", default="0.25%", show_default=True, help="Allowed loss increase, in percent.")
@click.option("--out", default="policy.toml", show_default=True, type=PathName(), help="Policy file.")
@click.option("--force", is_flag=True, help="Replace the files if they are there.")
@click.option("--batches", default=4, show_default=True, type=click.IntRange(2), help="Number of calibration batches.")
@click.option("--rows", type=click.IntRange(1), help="Rows of a batch; a micro-batch of the recipe if left out.")
@click.option("--warmup", default=50, show_default=True, type=click.IntRange(0), help="BF16 steps before measuring.")
@click.option("--run", "run", metavar="RUN", help="Measure at the weights of this run instead of warming up.")
@click.option(
    "--time",
    type=click.Choice(["measured", "h200", "ideal"]),
    help="Seconds measured here, estimated for an H200, or with free quantisation. "
    "If left out: measured where there is a unit for FP8 tiles, else h200.",
)
@json_option
@verbosity
@click.pass_context
def search(
    ctx: click.Context,
    recipe: str,
    budget: str,
    out: Path,
    force: bool,
    batches: int,
    rows: int | None,
    warmup: int,
    run: str | None,
    time: str | None,
    as_json: bool,
) -> None:
    """Measure each matmul of each layer in FP8; write the fastest policy within the budget.

    RECIPE is a TOML file or the name of a shipped recipe. Writes OUT, a recipe that `tilewright train` takes, and
    beside it a .json with all measurements and an .svg with the trade-off curve. Exits with 3 where no policy is within
    the budget.
    """
    loaded = load_recipe(recipe, overrides(ctx))
    from tilewright.precision.search.loss_model import parse_budget

    share = parse_budget(budget)
    # Measuring takes minutes: what would stop the files from being written is refused before it.
    files = {suffix: out.with_suffix(suffix) for suffix in (".toml", ".json", ".svg")}
    _check_files(files, loaded.path, force)
    from tilewright.cli import precision_output as output
    from tilewright.report.figures.tradeoff_figure import tradeoff_svg
    from tilewright.training.precision_search import SearchSettings, search

    settings = SearchSettings(share, batches, rows, warmup, time)
    found = search(loaded, settings, output.weights_of(run) if run else None)
    weights = run or f"{warmup} BF16 steps"
    intro = output.intro_of(found, loaded.name, budget, weights)
    facts = {"recipe": loaded.name, "budget": share, "weights": weights} | found.to_json()
    title = f"{loaded.name}: loss given up for speed"
    # All texts are made before the first file is written: an error leaves no policy without its measurements.
    texts = {
        ".toml": output.policy_text(found, loaded, files[".toml"], intro),
        ".json": to_json(facts, indent=1) + "\n",
        ".svg": tradeoff_svg(found, title),
    }
    _write(files, texts)
    if as_json:
        print_json(facts)
        return
    output.show(found, budget)
    say(f"wrote {files['.toml']}, {files['.json'].name} and {files['.svg'].name}")
    say(f"next   tilewright train {files['.toml']}")


def _check_files(files: dict[str, Path], recipe: Path | None, force: bool) -> None:
    """Check files of `precision search` before anything is measured: none is lost, and a policy does not extend itself.

    Raises:
        ConfigError: a file is there, its folder is not, or OUT is the searched recipe.
    """
    out = files[".toml"]
    if recipe is not None and out.resolve() == recipe.resolve():
        raise ConfigError(
            "Policy file would replace the recipe that it extends",
            got=str(out),
            need="another name",
            try_="--out policy.toml",
            where="--out",
        )
    there = [str(path) for path in files.values() if path.exists()]
    if there and not force:
        raise ConfigError(
            "Files already exist", got=", ".join(there), need="a new name, or --force", try_="--out NAME.toml"
        )
    if not out.parent.is_dir():
        raise ConfigError("No such folder", got=str(out.parent), need="a folder that is there", where="--out")


def _write(files: dict[str, Path], texts: dict[str, str]) -> None:
    try:
        for suffix, path in files.items():
            path.write_text(texts[suffix], encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "Policy cannot be written",
            got=f"{error.filename}: {error.strerror}",
            need="a folder that can be written to",
            try_="--out FOLDER/policy.toml",
            where="--out",
        ) from error

"""`tilewright init`: copies a shipped, commented recipe to where the user is."""

from pathlib import Path

import click

from tilewright.cli.common import PathName, recipe_argument, verbosity
from tilewright.core.config.load import shipped_recipes
from tilewright.core.config.toml import RECIPES
from tilewright.core.errors import ConfigError
from tilewright.core.log import say


@click.command()
@recipe_argument
@click.option("--to", type=PathName(), help="Output file. Default: the recipe's name, in the current folder.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@click.option("--list", "list_", is_flag=True, help="List the shipped recipes.")
@verbosity
def init(recipe: str, to: Path | None, force: bool, list_: bool) -> None:
    """Write a commented recipe here."""
    if list_:
        for name in shipped_recipes():
            click.echo(f"{name:<20} {_first_line(RECIPES / f'{name}.toml')}")
        return
    source = RECIPES / f"{recipe.removesuffix('.toml')}.toml"
    if not source.is_file():
        raise ConfigError(
            "No such recipe", got=recipe, need=f"one of {', '.join(shipped_recipes())}", try_="tilewright init --list"
        )
    target = to or Path(source.name)
    # A recipe that is there may hold edits.
    if target.exists() and not force:
        raise ConfigError(
            "File already exists",
            got=str(target),
            need="a new name, or --force",
            try_="tilewright init --to NAME",
        )
    try:
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise ConfigError(
            "Recipe cannot be written",
            got=f"{target}: {error.strerror}",
            need="a folder that is there and can be written to",
            try_="tilewright init --to FOLDER/NAME.toml",
        ) from error
    say(f"wrote {target}")
    say(f"next   tilewright plan {target}      does it fit, and how fast will it be?")
    say(f"       tilewright train {target}")


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()

"""Errors on the screen: the four parts of each problem, without a traceback."""

import click

from tilewright.core import env
from tilewright.core.errors import TilewrightError
from tilewright.core.log import wrap_text


def print_error(error: TilewrightError) -> None:
    """Print an error on standard error, in colour on a terminal."""
    for number, problem in enumerate(error.problems):
        if number:
            click.echo("", err=True)
        title, *rest = problem.lines()
        first = wrap_text(f"tilewright: {title}", env.columns()).removeprefix("tilewright:")
        click.echo(f"{click.style('tilewright:', fg='red', bold=True)}{first}", err=True, color=_color())
        for line in (wrap_text(line, env.columns(), hang=7) for line in rest):
            click.echo(f"{click.style(line[:9], dim=True)}{line[9:]}", err=True, color=_color())
    if len(error.problems) > 1:
        click.echo(f"\n{len(error.problems)} problems; nothing was run.", err=True)


def _color() -> bool | None:
    """False under NO_COLOR, else click's own choice: colour on a terminal."""
    return False if env.no_color() else None

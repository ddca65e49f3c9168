"""Errors of the command line: on the screen without a traceback, and in the words of a command without a recipe."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import click

from tilewright.core import env
from tilewright.core.errors import Problem, TilewrightError
from tilewright.core.log import wrap_text


def print_error(error: TilewrightError) -> None:
    """Print the text of an error on standard error, in colour on a terminal."""
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


def print_once(error: TilewrightError) -> None:
    """The text of an error once: `print_error`; of the ranks that torchrun started only by one, where all of them met
    the same error."""
    ranks = env.ranks()
    if ranks.world > 1:
        from tilewright.parallel.liveness.ending import prints  # torch, so only where there are ranks
        from tilewright.parallel.liveness.rank_failure import RankFailedError, speaks_for_others

        if isinstance(error, RankFailedError):  # torchrun starts again when the last one has ended: no process waits
            if not speaks_for_others(ranks.rank, error.failed):
                return
        elif not prints(str(error)):
            return
        if ranks.rank:
            click.echo(f"rank {ranks.rank} of {ranks.world}:", err=True)
    print_error(error)


def is_of_others(error: RuntimeError) -> bool:
    """True if this rank failed because another rank had failed. That other rank prints what happened; this one names
    it."""
    ranks = env.ranks()
    if ranks.world == 1:
        return False
    from tilewright.parallel.liveness.ending import is_lost_store, others_failed

    failed = others_failed()
    if not failed and ranks.rank and is_lost_store(error):
        failed = [0]
    if failed:
        first = f"{error}".partition("\n")[0]
        click.echo(f"rank {ranks.rank} of {ranks.world} ends since rank {failed[0]} did: {first}", err=True)
    return bool(failed)


def _color() -> bool | None:
    """Decide if an error's text has colours: not under NO_COLOR, else click's own choice (a terminal has)."""
    return False if env.no_color() else None


@contextmanager
def told_without_settings(try_: str, where: str) -> Iterator[None]:
    """Replace advice to change settings in errors that are raised inside: the command has no settings.

    Args:
        try_: what to do instead, where all that an error proposes are settings.
        where: instead of a setting: the command's option or argument.

    Example:
        >>> from tilewright.core.errors import ConfigError
        >>> with told_without_settings("--chat-template FILE.jinja", "--chat-template"):
        ...     raise ConfigError("No template", try_='data.chat_template = "chatml"', where="data.chat_template")
        Traceback (most recent call last):
        tilewright.core.errors.ConfigError: No template
          where  --chat-template
          try    --chat-template FILE.jinja
    """
    from tilewright.core.config.setting_names import fields

    try:
        yield
    except TilewrightError as error:
        setting = re.compile("|".join(rf"\b{re.escape(field.path)}\b" for field in fields()))
        if not any(setting.search(f"{problem.try_}\n{problem.where}") for problem in error.problems):
            raise
        raise type(error).from_problems([_told(problem, setting, try_, where) for problem in error.problems]) from error


def _told(problem: Problem, setting: re.Pattern[str], try_: str, where: str) -> Problem:
    kept = [line for line in problem.try_.split("\n") if not setting.search(line)]
    place = where if setting.search(problem.where) else problem.where
    return replace(problem, try_="\n".join(kept) or try_, where=place)

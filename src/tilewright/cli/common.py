"""Parts that commands share: the recipe argument with `--section.field value`, numbers, verbosity, and JSON output."""

import contextlib
import difflib
import gc
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tilewright.cli.table_layout import lay_out
from tilewright.core import env, log
from tilewright.core.config.section import is_too_long
from tilewright.core.env import MOST_THREADS
from tilewright.core.errors import ConfigError, DataError, path_error
from tilewright.core.json_text import to_json
from tilewright.core.log import say

_OVERRIDES = "tilewright.overrides"
_ANSWER = "tilewright.answer"
"""Of a context: the stream that `print_json` writes to."""
LATEST = "runs/latest"
Function = TypeVar("Function", bound=Callable[..., Any])

SEED = click.IntRange(0, 2**63 - 1)
"""Of random numbers, as `run.seed`."""
THREADS = click.IntRange(1, MOST_THREADS)
"""Of a CPU, as `run.threads`."""


class FiniteRange(click.FloatRange):
    """click's, which takes "nan" for a number in any range, and "inf" in one without an end.

    Example:
        >>> FiniteRange(0).convert("nan", None, None)
        Traceback (most recent call last):
        click.exceptions.BadParameter: 'nan' is not a finite number.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


class PathName(click.Path):
    """click's path of an argument or option, as `Path` or as text. One at which no file can be is an error before
    anything is done, which may take hours."""

    def __init__(self, kind: type[str] | type[Path] = Path, *, dir_okay: bool = True) -> None:
        super().__init__(dir_okay=dir_okay, path_type=kind)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if is_too_long(os.fspath(value)):
            raise path_error(os.fspath(value))
        return super().convert(value, param, ctx)


class RecipeCommand(click.Command):
    """A command that takes any setting of the recipe as `--section.field value`.

    A dot in an option's name marks a setting; all other options are click's, so that a typing error in one
    is still an error.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        settings: list[str] = []
        others: list[str] = []
        rest = list(args)
        while rest:
            argument = rest.pop(0)
            name, equals, _ = argument.partition("=")
            if not (argument.startswith("--") and "." in name):
                others.append(argument)
                continue
            settings.append(argument)
            if not equals and rest and not rest[0].startswith("--"):
                settings.append(rest.pop(0))
        ctx.meta[_OVERRIDES] = settings
        try:
            return super().parse_args(ctx, others)
        except click.NoSuchOption as error:
            raise self._explained(error, ctx) from error

    def _explained(self, error: click.NoSuchOption, ctx: click.Context) -> click.UsageError:
        """The error of a command with a recipe, with the nearest option or setting."""
        from tilewright.core.config import setting_names

        # Compared without the dashes, which make all short options look alike.
        options = [
            max(item.opts, key=len).lstrip("-") for item in self.get_params(ctx) if isinstance(item, click.Option)
        ]
        near = difflib.get_close_matches(error.option_name.lstrip("-"), options, n=1)
        name = error.option_name.lstrip("-")
        setting = setting_names.suggest(name)
        if "." in setting and (not near or setting_names.spelled(name)):
            near = [setting]
        hint = f"Did you mean --{near[0]}?" if near else "Settings are written --section.field value."
        return click.UsageError(f"No such option {error.option_name!r}. {hint}", error.ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Settings"):
            formatter.write_dl(
                [("--section.field VALUE", "Any setting of the recipe; `tilewright inspect` lists them all.")]
            )


def recipe_argument(function: Function) -> Function:
    """The optional recipe, `default` where it is left out."""
    return click.argument("recipe", default="default", metavar="[RECIPE]")(function)


def run_argument(function: Function) -> Function:
    """A run folder, `runs/latest` where it is left out."""
    return click.argument("run", default=LATEST, metavar="[RUN]", callback=_run_folder)(function)


def _run_folder(ctx: click.Context, param: click.Parameter, value: str) -> Path:
    return find_run(value)


def run_or_model(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """Callback of an argument that names a run or a model: a latest run that is not there is an error before torch is
    imported, which takes seconds.

    Raises:
        ConfigError: `runs/latest` is meant, and there is none.
    """
    if value == LATEST:
        find_run(value)
    return value


def is_run(value: str) -> bool:
    """True where a path, or a name below `runs`, means a run's folder; `runs/latest` always does."""
    return value == LATEST or _run_at(value) is not None


def _run_at(value: str) -> Path | None:
    return next((folder for folder in (Path(value), Path("runs") / value) if (folder / "run.toml").is_file()), None)


def find_run(value: str) -> Path:
    """The folder meant by a path, or by a name below `runs`.

    Raises:
        ConfigError: neither is the folder of a run.
    """
    if (found := _run_at(value)) is not None:
        return found
    beside = Path("runs") if Path("runs").is_dir() else Path(value).parent
    found = sorted(path.parent.name for path in beside.glob("*/run.toml"))
    raise ConfigError(
        "No such run",
        got=value,
        need="a folder with a run.toml" + (f"; in {beside}: {', '.join(found)}" if found else ""),
        try_="tilewright train, which makes one",
    )


def verbosity(function: Function) -> Function:
    """`-v` and `--quiet`, which configure logging; the command does not see them."""

    def loud(ctx: click.Context, param: click.Parameter, value: int) -> None:
        if ctx.obj is not None:
            ctx.obj.verbosity = value
        log.configure(value)

    def quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            log.configure(quiet=True)

    function = click.option(
        "-q", "--quiet", is_flag=True, expose_value=False, callback=quiet, help="Print errors and results only."
    )(function)
    return click.option(
        "-v",
        "--verbose",
        "verbose",
        count=True,
        expose_value=False,
        is_eager=True,  # before --quiet, which it would else take back where it is not given
        callback=loud,
        help="Print decisions; twice: details.",
    )(function)


def open_in_browser(address: str) -> None:
    """Open a command's page in the browser; where there is none that is said, with the address, and is no error."""
    import webbrowser  # here, so that --help stays fast

    if not webbrowser.open(address):
        say(f"note: no browser was found; open it yourself: {address}", error=True)


def is_verbose() -> bool:
    """True where the command was verbose: given `-v`."""
    return log.get_logger(log.ROOT).isEnabledFor(logging.INFO)


def json_option(function: Function) -> Function:
    """`--json`: one JSON object on standard output instead of text.

    All else that is said until the command ends, such as progress, goes to standard error.
    """

    def aside(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        if value:
            ctx.meta[_ANSWER] = sys.stdout
            ctx.with_resource(contextlib.redirect_stdout(sys.stderr))
        return value

    return click.option("--json", "as_json", is_flag=True, callback=aside, help="Print JSON.")(function)


def overrides(ctx: click.Context) -> list[str]:
    """The settings on this command line, as typed."""
    return ctx.meta[_OVERRIDES]


def print_json(value: object) -> None:
    """JSON on standard output, whatever the verbosity; numbers that are not finite are null."""
    ctx = click.get_current_context(silent=True)
    click.echo(to_json(value, indent=2), file=None if ctx is None else ctx.meta.get(_ANSWER))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Show a command's table on standard output, whatever the verbosity: fitted to a terminal, else one whole line per
    row."""
    for line in lay_out(columns, rows, env.columns()):
        click.echo(line)


def echo(text: str = "", hang: int = 2) -> None:
    """Text on standard output, whatever the verbosity: wrapped to a terminal, else as it is. See `log.wrap_text`."""
    click.echo(log.wrap_text(text, env.columns(), hang))


def show_dicts(rows: Sequence[dict[str, Any]]) -> None:
    """Show a command's table of equal dicts, one column a key."""
    show_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    """Format one cell of a command's table: pairs as `name: text; ...`, other lists as a shape, all else as it
    prints."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        return "; ".join(": ".join(map(str, pair)) for pair in value)
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return str(value)


def write_answer(option: str, path: str, text: str) -> None:
    """Write a file that a command's option asks for, whole or not at all, and say so.

    Args:
        option: its name, as `--html`.
        path: that was typed.
        text: of the file.

    Raises:
        DataError: the file cannot be written.
    """
    from tilewright.core.atomic_io import write_whole

    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise DataError(
            f"File of {option} cannot be written",
            got=str(error),
            need="a folder in which files can be made",
            try_=f"another path for {option}",
            where=path,
        ) from error
    say(f"wrote {path}")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Around the import of torch in a command: nothing is searched for garbage meanwhile, and what was imported never.

    Its modules make a million objects, of which a hundred are garbage afterwards. Looking through them again and again
    takes a sixth of the time that a command needs to start, 0.2 s whenever all is searched in training, and 0.3 s at
    the end (docs/log.md). Where torch was there before, there is much else that must not be kept for good.
    """
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()

"""What the program says: standard logging for decisions, `say` for the user's own screen.

`get_logger` is for library code and adds no handler: a Python user configures logging as usual.
`configure` is called once by the command line. `say` prints results and progress; it is silent
under `--quiet` and on all ranks but the first.
"""

import logging
import sys
import textwrap

from tilewright.core import env
from tilewright.core.units import HARD_SPACE, bind_units

ROOT = "tilewright"


def get_logger(name: str) -> logging.Logger:
    """A logger below `tilewright`; `name` is usually `__name__`."""
    return logging.getLogger(name if name == ROOT or name.startswith(ROOT + ".") else f"{ROOT}.{name}")


def configure(verbosity: int = 0, quiet: bool = False) -> None:
    """Sets level and handler of our loggers, for the command line only.

    Args:
        verbosity: 0 warnings, 1 decisions (INFO), 2 and more details (DEBUG).
        quiet: errors only, and `say` prints nothing.
    """
    root = logging.getLogger(ROOT)
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.propagate = False
    root.setLevel(logging.ERROR if quiet else {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def wrap_text(text: str, columns: int | None, hang: int = 2) -> str:
    """Text in lines that are not longer than `columns`; None: as it is.

    Lines break between words, those of progress after ` |`. The text after a break is indented by `hang` columns more
    than its line. A word that is longer than a line stays whole, since it may be a path.

    Example:
        >>> print(wrap_text("step 1/20 | loss 9.0661 | wait 0 %", 26))
        step 1/20 | loss 9.0661 |
          wait 0 %
    """
    if columns is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        *first, last = bind_units(line.strip()).split(" | ")
        parts = [*(f"{part} |" for part in first), last]
        if first:  # a part is one word where it fits in a line
            parts = [part.replace(" ", HARD_SPACE) if len(part) + hang <= columns else part for part in parts]
        wrapped = textwrap.wrap(
            " ".join(parts),
            max(columns, 20),
            initial_indent=indent,
            subsequent_indent=indent + " " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += [one.replace(HARD_SPACE, " ") for one in wrapped] or [""]
    return "\n".join(lines)


def say(what: object = "", *, error: bool = False) -> None:
    """Prints text or a rich renderable: rich on a terminal, plain text otherwise.

    Args:
        what: a string (no markup is read in it) or anything rich can print, such as a `rich.table.Table`.
        error: to standard error, and also under `--quiet`.
    """
    if env.ranks().rank != 0 or (not error and get_logger(ROOT).level >= logging.ERROR):
        return
    stream = sys.stderr if error else sys.stdout
    if isinstance(what, str):
        what = wrap_text(what, env.columns())
    if isinstance(what, str) and not stream.isatty():
        print(what, file=stream, flush=True)
        return
    from rich.console import Console  # 0.1 s, so only where it is used

    # Without a terminal there is no width to fit: tables keep their full rows, so that grep finds them.
    console = Console(file=stream, no_color=env.no_color() or None, width=None if stream.isatty() else 160)
    console.print(what, markup=False, highlight=isinstance(what, str), soft_wrap=isinstance(what, str))

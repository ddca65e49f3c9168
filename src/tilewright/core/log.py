"""What the program says: standard logging for decisions, `say` for the user's own screen.

`get_logger` is for library code and adds no handler: a Python user configures logging as usual.
`configure` is called once by the command line. `say` prints results and progress; it is silent
under `--quiet` and on all ranks but the first.
"""

import logging
import sys

from tilewright.core import env

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


def say(what: object = "", *, error: bool = False) -> None:
    """Prints text or a rich renderable: rich on a terminal, plain text otherwise.

    Args:
        what: a string (no markup is read in it) or anything rich can print, such as a `rich.table.Table`.
        error: to standard error, and also under `--quiet`.
    """
    if env.ranks().rank != 0 or (not error and get_logger(ROOT).level >= logging.ERROR):
        return
    stream = sys.stderr if error else sys.stdout
    if isinstance(what, str) and not stream.isatty():
        print(what, file=stream, flush=True)
        return
    from rich.console import Console  # 0.1 s, so only where it is used

    # Without a terminal there is no width to fit: tables keep their full rows, so that grep finds them.
    console = Console(file=stream, no_color=env.no_color() or None, width=None if stream.isatty() else 160)
    console.print(what, markup=False, highlight=isinstance(what, str), soft_wrap=isinstance(what, str))

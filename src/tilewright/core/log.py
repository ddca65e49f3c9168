"""Output of the program: standard logging for decisions, `say` for the user's own screen.

`get_logger` is for library code and adds no handler: a Python user configures logging as usual.
`configure` is called once by the command line. `say` prints results and progress; it is silent
under `--quiet` and on all ranks but the first.
"""

import logging
import sys
import textwrap
import threading
import time
from collections.abc import Callable

from tilewright.core import env
from tilewright.core.units import HARD_SPACE, bind_units, format_seconds

ROOT = "tilewright"
QUIET_S = 25.0
"""Seconds of silence after which a program that works says so: half a minute at most, with the time of a line."""


def get_logger(name: str) -> logging.Logger:
    """A logger of the log below `tilewright`; `name` is usually `__name__`."""
    return logging.getLogger(name if name == ROOT or name.startswith(ROOT + ".") else f"{ROOT}.{name}")


def configure(verbosity: int = 0, quiet: bool = False) -> None:
    """Set level and handler of our loggers, for the command line only.

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
    """Wrap text of the log in lines that are not longer than `columns`; None: as it is.

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
    """Print text or a rich renderable beside the log: rich on a terminal, plain text otherwise.

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


class Pulse:
    """Says now and then what is going on, so that a program that works can be told from one that hangs.

    A context manager. It says something only while nothing else is said, from a thread of its own.

    Args:
        tell: called with a line of text.
        every_s: seconds of silence.
        on: False: says nothing. On a terminal a live line or a bar is there instead.
    """

    def __init__(self, tell: Callable[[str], object] = say, every_s: float = QUIET_S, *, on: bool = True) -> None:
        self._tell = tell
        self._every_s = every_s
        self._what: Callable[[], str] | str = ""
        self._next = self._last = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True) if on else None

    def at(self, what: Callable[[], str] | str, *, said: bool = True) -> None:
        """Change the phrase of the log's pulse when something else begins: a phrase, or a function that returns one;
        empty while another pulse speaks. `said`: in a line."""
        self._what = what
        if said:
            self.said()

    def said(self) -> None:
        """The log's pulse after something was said, or begins, just now."""
        self._last = time.monotonic()
        self._next = self._last + self._every_s

    def __enter__(self) -> "Pulse":
        self.said()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(max(0.01, self._next - time.monotonic())):
            if (now := time.monotonic()) < self._next:
                continue
            self._next = now + self._every_s
            what = self._what if isinstance(self._what, str) else self._what()
            if what:
                try:
                    self._tell(f"{what}: working, {format_seconds(now - self._last)} after the last line")
                except BrokenPipeError:  # the reader is gone; the main thread will meet it too
                    return

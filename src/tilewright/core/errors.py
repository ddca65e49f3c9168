"""Errors that a user can act on: what happened, what was got, what is needed, what to try.

Every error a user can cause derives from `TilewrightError` and carries the four parts and an exit
code. The command line prints them without a traceback; library users catch the classes.
Bugs of ours stay ordinary exceptions (`AssertionError`, `TypeError`) and keep their traceback.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_LINES = 60
"""Lines of an error, which fits a screen; further problems are counted."""
MAX_LINE = 800
"""Characters of a line of it."""
EXIT_INPUT = 2
EXIT_DOES_NOT_FIT = 3
EXIT_NUMERICS = 4
EXIT_HARDWARE = 5
EXIT_NOT_KNOWN = 6


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in four parts. `where` names the file, line, option or module."""

    what: str
    got: str = ""
    need: str = ""
    try_: str = ""
    where: str = ""

    def lines(self) -> list[str]:
        """The problem as aligned text lines, the empty parts left out; long ones cut, control characters escaped."""
        parts = [("where", self.where), ("got", self.got), ("need", self.need), ("try", self.try_)]
        body = []
        for label, text in parts:
            for i, line in enumerate(_screen_lines(text)):
                body.append(f"  {label if i == 0 else '':<6} {line}")
        return [*_screen_lines(self.what), *body]


def _screen_lines(text: str) -> list[str]:
    lines = text.split("\n") if len(text) <= MAX_LINE * MAX_LINES else text[: MAX_LINE * MAX_LINES].split("\n")
    if len(lines) > MAX_LINES // 2:
        lines = [*lines[: MAX_LINES // 2], "..."]
    return [_screen_line(line.rstrip("\r")) for line in lines if line or len(lines) > 1]


def _screen_line(line: str) -> str:
    cut = line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 8 :]}"
    if not cut.isprintable():  # a value may hold what moves the cursor, or what is no UTF-8
        cut = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
    return cut


class TilewrightError(Exception):
    """Base of all errors that a user can act on.

    Args:
        what: one sentence, what cannot be done.
        got: what was found.
        need: what would have been right.
        try_: what to do next, a command or a setting where possible.
        where: file, option or module concerned.
    """

    exit_code = 1

    def __init__(self, what: str, *, got: str = "", need: str = "", try_: str = "", where: str = ""):
        self.problems: tuple[Problem, ...] = (Problem(what, got, need, try_, where),)
        super().__init__(str(self))

    @classmethod
    def from_problems(cls, problems: Sequence[Problem]) -> "TilewrightError":
        """An error that reports several problems at once, in the order given."""
        if not problems:
            raise AssertionError("from_problems needs at least one problem")
        first = problems[0]
        error = cls(first.what, got=first.got, need=first.need, try_=first.try_, where=first.where)
        error.problems = tuple(problems)
        error.args = (str(error),)
        return error

    def __str__(self) -> str:
        lines: list[str] = []
        for number, problem in enumerate(self.problems):
            more = problem.lines()
            if lines and len(lines) + len(more) >= MAX_LINES:
                return "\n".join([*lines, f"... and {len(self.problems) - number} more problems"])
            lines += more
        return "\n".join(lines)


class ConfigError(TilewrightError):
    """A recipe, override or environment variable that is not right."""

    exit_code = EXIT_INPUT


class DataError(TilewrightError):
    """Training data that cannot be used at all (single bad files are set aside, not raised)."""

    exit_code = EXIT_INPUT


class LabelError(DataError, IndexError):
    """Labels of a loss that are no class of it. Torch's losses raise an IndexError, which this is too."""


class CheckpointError(TilewrightError):
    """A checkpoint that is missing, corrupt, of another model, or cannot be written."""

    exit_code = EXIT_INPUT


class FitError(TilewrightError):
    """A run that cannot fit into the memory there is."""

    exit_code = EXIT_DOES_NOT_FIT


class UnknownFitError(TilewrightError):
    """A run of which the planner cannot say whether it fits, where that was asked."""

    exit_code = EXIT_NOT_KNOWN


class NumericsError(TilewrightError):
    """A run stopped because its numbers went bad (NaN loss, scale at its floor)."""

    exit_code = EXIT_NUMERICS


class HardwareError(TilewrightError):
    """Something asked for that this machine cannot do."""

    exit_code = EXIT_HARDWARE

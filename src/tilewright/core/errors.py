"""Errors that a user can act on: what happened, what was got, what is needed, what to try.

Every error a user can cause derives from `TilewrightError` and carries the four parts and an exit
code. The command line prints them without a traceback; library users catch the classes.
Bugs of ours stay ordinary exceptions (`AssertionError`, `TypeError`) and keep their traceback.
"""

import errno
import mmap
import os
import resource
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
        """The problem of an error as aligned text lines, the empty parts left out; long ones cut, control characters
        escaped."""
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
    return printable(cut)


def printable(text: str) -> str:
    """Printable text of an error: `text` with what no line of text holds escaped: what ends it or moves the cursor, or
    is no UTF-8.

    Example:
        >>> printable("caf\\udce9\\n"), printable("café")
        ('caf\\\\udce9\\\\n', 'café')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


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
    """Numbers are wrong: a loss that is not finite, a loss scale at its floor, an export beyond its limits."""

    exit_code = EXIT_NUMERICS


class HardwareError(TilewrightError):
    """Something asked for that this machine cannot do."""

    exit_code = EXIT_HARDWARE


LONGEST_NAME, LONGEST_PATH = 255, 4096
"""Bytes of a path that a user's error is about, and of each name in it, of Linux."""


def is_of_path(error: BaseException) -> bool:
    """True if an error is about a path alone, whatever was to be done with it: it is too long, or in a folder that this
    user may not look into.

    Example:
        >>> [is_of_path(OSError(code, "text", "x")) for code in (errno.ENAMETOOLONG, errno.EACCES, errno.ENOSPC)]
        [True, True, False]
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENAMETOOLONG, errno.EACCES):
        return False
    return isinstance(error.filename, str | bytes)


def path_error(path: str, got: str = "") -> ConfigError:
    """The error for a user about a path that cannot be used: it is too long, or an error that `is_of_path` came of it.

    Args:
        path: that was given.
        got: what the system said; "": its length.
    """
    return ConfigError(
        "Path cannot be used",
        got=got or f"a path of {len(os.fsencode(path)):,} bytes",
        need=f"a path that this user may look at, below {LONGEST_PATH} bytes, names in it of at most {LONGEST_NAME}",
        try_="the path as `ls` shows it; or a link to it from another folder",
        where=path if len(path) <= _SHOWN else f"{path[:_SHOWN]}...",
    )


_SHOWN = 80  # characters of a path
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FILES = (errno.EMFILE, errno.ENFILE)
_MEMORY = (errno.ENOMEM, errno.EAGAIN)
_UNREADABLE = (errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOENT, errno.EACCES, errno.EPERM)
_LARGE_BYTES, _SMALL_BYTES = 1 << 30, 1 << 26


def is_of_machine(error: BaseException) -> bool:
    """True if an error is about what this machine lacks (disk, open files, memory), whatever was read or written.

    A damaged file may ask for petabytes: a MemoryError is the machine's where a GiB of addresses cannot be had.

    Example:
        >>> [is_of_machine(error) for error in (OSError(errno.ENOSPC, "full"), OSError("bad data"), MemoryError())]
        [True, False, False]
    """
    if isinstance(error, MemoryError):
        return not _has_addresses(_LARGE_BYTES)
    return isinstance(error, OSError) and error.errno in (*_FULL, *_FILES, *_MEMORY)


def _has_addresses(num_bytes: int) -> bool:
    try:
        mmap.mmap(-1, num_bytes).close()
    except OSError:
        return False
    return True


def is_damage(error: BaseException) -> bool:
    """True if an error of a parser is about the bytes that it got: not of the machine, nor of a file that cannot be
    read. Parsers raise OSErrors without a number, too; where there is no memory, nothing that they say is believed.

    Example:
        >>> is_damage(OSError("Invalid data stream")), is_damage(OSError(errno.EIO, "Input/output error"))
        (True, False)
    """
    readable = getattr(error, "errno", None) not in _UNREADABLE
    return readable and not is_of_machine(error) and _has_addresses(_SMALL_BYTES)


def check_damage(error: BaseException) -> None:
    """Check an error of a parser: return where it `is_damage`.

    Raises:
        OSError, MemoryError: it is not.
    """
    if not is_damage(error):
        raise error if isinstance(error, OSError | MemoryError) else MemoryError(str(error)) from error


def machine_error(error: BaseException, where: str, *, disk: str = "free some space") -> TilewrightError:
    """The error for a user about what this machine lacks.

    Args:
        error: one that `is_of_machine`, or another of the system.
        where: the file or folder.
        disk: what to do where the disk is full.
    """
    number, got = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error) or "MemoryError"
    again = "and run the same command again: nothing that is finished is lost"
    if number in _FILES:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        need = f"some more than the {most} open files that this process may have"
        return HardwareError("Too many open files", got=got, need=need, try_=f"ulimit -n 4096, {again}", where=where)
    if isinstance(error, MemoryError) or number in _MEMORY:
        way = f"fewer processes at the same time, or a higher limit (ulimit -v), {again}"
        return HardwareError("Not enough memory", got=got, need="memory for this process", try_=way, where=where)
    if number == errno.EFBIG:
        way = f"ulimit -f unlimited, {again}"
        return DataError("File as large as a file may be", got=got, need="a higher limit", try_=way, where=where)
    if number in _FULL:
        way = f"{disk}, {again}"
        return DataError("No space left to write", got=got, need="room on the disk", try_=way, where=where)
    way = f"one that this user can read and write, {again}"
    return DataError("File or folder cannot be used", got=got, need="a disk without errors", try_=way, where=where)

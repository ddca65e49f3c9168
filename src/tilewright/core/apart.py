"""A function called in a Python process of its own: what it took of memory goes with that process.

Freed blocks do not leave a process when a small block that lives on shares their pages. Preparing data leaves 110 MiB
of such pages and measuring the machine 60, in a process that then trains for weeks beside them (docs/log.md).

The child reads a call from its stdin and answers through a pipe: log records while it runs, then what the call
returned or raised. It shares the terminal, and ends when its parent does. POSIX only. (`multiprocessing` would start
the user's script a second time, which a script without a guard does not survive.)
"""

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, Any, ParamSpec, TypeVar

from tilewright.core.errors import HardwareError, TilewrightError
from tilewright.core.log import ROOT, get_logger

P = ParamSpec("P")
T = TypeVar("T")

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from tilewright.core.apart import serve
serve()
"""


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)`, run by a new Python process.

    Args:
        function: one that can be imported by its name.
        args, kwargs: what pickle can carry.

    Returns:
        What the function returned, pickled and read back. What it printed is printed, what it logged is logged here.

    Raises:
        HardwareError: the process was ended from outside, as a system short of memory does.
        Exception: what the function raised; where that was no `TilewrightError`, with the child's traceback in a note.

    Example:
        >>> import os
        >>> apart(os.getpid) != os.getpid()
        True
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, pass_fds=(writing,))
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as answers:
            _give(child, sys.path, (writing, get_logger(ROOT).level, function, args, kwargs))
            kind, value = _follow(answers)
        if kind == "returned":
            return value
        if kind == "raised":
            raise value
        code = child.wait()
    finally:
        child.kill()
        child.wait()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()  # type: ignore[union-attr]
    if code >= 0:
        raise AssertionError(f"{function} ended its process with exit code {code}")
    raise HardwareError(
        "A process that did part of the work was ended from outside.",
        got=f"signal {-code} ({signal.Signals(-code).name})",
        need="memory enough for it: Linux ends processes when there is none left",
        try_="the same command again with more memory free",
        where=f"{function.__module__}.{getattr(function, '__qualname__', '')}",
    )


def here(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The same call in this process: the other choice of who takes either."""
    return function(*args, **kwargs)


def _give(child: subprocess.Popen[bytes], *orders: object) -> None:
    """Write orders to the child's stdin, which stays open. A child that has ended is told by its exit code."""
    assert child.stdin is not None
    text = b"".join(map(pickle.dumps, orders))
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(text)
        child.stdin.flush()


def _follow(answers: IO[bytes]) -> tuple[str, Any]:
    """Hand on log records until the call's end: ("returned", value), ("raised", exception) or ("ended", None)."""
    while True:
        try:
            kind, value = pickle.load(answers)
        except (EOFError, pickle.UnpicklingError):
            return "ended", None
        if kind != "logged":
            return kind, value
        logger = logging.getLogger(value.name)
        if logger.isEnabledFor(value.levelno):
            logger.handle(value)


def serve() -> None:
    """In the child: take one call from stdin, make it, answer."""
    answer, level, function, args, kwargs = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(answer, "wb") as answers:
        root = get_logger(ROOT)
        root.setLevel(level)
        root.propagate = False
        root.addHandler(_Sender(answers))
        try:
            found = "returned", function(*args, **kwargs)
        except KeyboardInterrupt:
            return  # the parent was interrupted, too
        except Exception as error:  # noqa: BLE001 - the parent raises it
            if not isinstance(error, TilewrightError):
                error.add_note("".join(traceback.format_exception(error)))
            found = "raised", error
        pickle.dump(found, answers)
        sys.stdout.flush()


def _end_with_parent() -> None:
    """The parent keeps our stdin open as long as it wants an answer."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


class _Sender(logging.Handler):
    """Sends log records to the parent, their text finished so that they can be pickled."""

    def __init__(self, answers: IO[bytes]) -> None:
        super().__init__()
        self._answers = answers

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        pickle.dump(("logged", record), self._answers)
        self._answers.flush()

"""A function of ours called by `python -m`: the memory that it takes goes with that process.

Freed blocks do not leave a process when a small block that lives on shares their pages. Preparing data leaves 110 MiB
of such pages and measuring the machine 60, in a process that then trains for weeks beside them (docs/log.md).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilewright.core import env, errors
from tilewright.core.errors import HardwareError, Problem, TilewrightError
from tilewright.core.log import ROOT, configure, get_logger, say

_POLL_S = 0.1


def call_module(
    module: str,
    on_line: Callable[[str], object] = say,
    environ: Mapping[str, str] | None = None,
    on_start: Callable[["subprocess.Popen[str]"], object] = lambda _: None,
    **arguments: object,
) -> Any:
    """Run `python -m module` as a subprocess, which calls `answer`, and return its result.

    Args:
        module: its full name.
        on_line: called with each line that the child prints. What it logs goes to stderr.
        environ: variables of the child in addition to this process's.
        on_start: given the process.
        arguments: of the function that the module gives to `answer`, as JSON has them.

    Returns:
        What that function returned, as JSON has it.

    Raises:
        TilewrightError: the one that the function raised.
        HardwareError: the process was killed.
    """
    with _started(module, arguments, environ) as child:
        on_start(child)
        found = _read(child, on_line)
    return _result(module, child, found)


class ModuleWorker:
    """A process of `python -m module` that stays between calls: what it has imported is there for the next one. It ends
    with its owner.

    Args:
        module: see `call_module`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: subprocess.Popen[str] | None = None

    def call(self, **arguments: object) -> Any:
        """Call the function in the subprocess: see `call_module`."""
        if self._child is None:
            self._child = _started(self._module, arguments, stays=True)
            weakref.finalize(self, _end, self._child)
        else:
            assert self._child.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: why is told below
                print(_request(arguments, stays=True), file=self._child.stdin, flush=True)
        found = _read(self._child, say, once=True)
        if not found:
            self._child.wait()
        return _result(self._module, self._child, found)


def end_with_parent(parent: int) -> None:
    """End this process, from a thread that watches, when its parent is gone: a killed parent cannot end it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _request(arguments: Mapping[str, object], *, stays: bool) -> str:
    level = get_logger(ROOT).getEffectiveLevel()
    return json.dumps({"level": level, "arguments": arguments, "stays": stays, "parent": os.getpid()})


def _started(
    module: str, arguments: Mapping[str, object], environ: Mapping[str, str] | None = None, *, stays: bool = False
) -> "subprocess.Popen[str]":
    sys.stdout.flush()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, _request(arguments, stays=stays)],
        stdin=subprocess.PIPE if stays else None,
        stdout=subprocess.PIPE,
        text=True,
        env=env.importing(Path(__file__).parents[2]) | dict(environ or {}),
    )


def _read(child: "subprocess.Popen[str]", on_line: Callable[[str], object], *, once: bool = False) -> dict[str, Any]:
    """Read a subprocess: its last answer, up to its end; the first one, where it stays."""
    found: dict[str, Any] = {}
    assert child.stdout is not None
    for line in child.stdout:
        if not line.startswith("{"):
            on_line(line.rstrip("\n"))
            continue
        found = json.loads(line)
        if once:
            break
    return found


def _end(child: "subprocess.Popen[str]") -> None:
    """End a subprocess that stays: let it see the end of its requests, and wait until it is gone."""
    assert child.stdin is not None
    with child, suppress(BrokenPipeError):  # it has ended, and did not read all
        child.stdin.close()


def _result(module: str, child: "subprocess.Popen[str]", found: dict[str, Any]) -> Any:
    """Read the answer of a subprocess.

    Raises:
        TilewrightError, HardwareError: see `call_module`.
    """
    if "problems" in found:
        raise getattr(errors, found["error"]).from_problems([Problem(**problem) for problem in found["problems"]])
    if (child.returncode or 0) < 0:
        raise HardwareError(
            "Worker process was killed",
            got=f"signal {-child.returncode} ({signal.Signals(-child.returncode).name})",
            need="enough memory for it: Linux kills processes when there is none left",
            try_="the same command again with more memory free",
            where=module,
        )
    if child.returncode or not found:
        raise AssertionError(f"python -m {module} ended with exit code {child.returncode}; see its traceback above")
    return found["result"]


def answer(function: Callable[..., object]) -> None:
    """Serve `call_module` from inside the subprocess: call `function` with the arguments, and print its result or error
    as JSON. For a `ModuleWorker`, serve calls until there are no more."""
    request = json.loads(sys.argv[1])
    end_with_parent(request["parent"])
    configure()
    get_logger(ROOT).setLevel(request["level"])
    try:
        while request:
            try:
                print(json.dumps({"result": function(**request["arguments"])}), flush=True)
            except TilewrightError as error:
                answer_error(error)
            request = json.loads(sys.stdin.readline() or "null") if request["stays"] else None
    except KeyboardInterrupt:  # the parent was interrupted, too
        sys.exit(130)


def answer_error(error: TilewrightError) -> None:
    """Print an error from the subprocess as `call_module` reads it; a subclass of ours is named as its nearest class in
    `errors`."""
    name = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    print(json.dumps({"error": name, "problems": [asdict(problem) for problem in error.problems]}), flush=True)

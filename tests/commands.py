"""Commands and modules of ours in processes of their own, which begin with everything imported: they are under way in a
tenth of a second, where `python -m tilewright` imports for three."""

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import current_process
from pathlib import Path
from typing import Any

import pytest

from tests.disk import not_waited_for
from tests.ranks import fork_server


class Command:
    """A process that runs a command line; what tests use of `subprocess.Popen`. It has this process's variables and
    its folder, and what it prints and logs is one text.

    Args:
        args: after `tilewright`, as typed.
        module: is run instead of `tilewright`, as by `python -m`.
        leads: it leads a group of processes, which a test can kill.
        environ: variables in addition to those of this process. Those that an import reads have no effect.
    """

    def __init__(
        self, args: Sequence[str], *, module: str = "", leads: bool = False, environ: Mapping[str, str] | None = None
    ) -> None:
        with tempfile.NamedTemporaryFile("w", delete=False) as said:
            self._said = Path(said.name)
        given = (list(args), module, leads, os.environ | dict(environ or {}), said.name)
        self._process = fork_server().Process(target=_main, args=given, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def line(self, timeout: float, word: str) -> str:
        """The first line with a word that it prints.

        Raises:
            AssertionError: it ended, or so many seconds went by, without one.
        """
        until = time.monotonic() + timeout
        while True:
            ended, text = self.poll() is not None, self._said.read_text()
            found = [line for line in text.splitlines(keepends=True) if word in line and line.endswith("\n")]
            if found:
                return found[0]
            assert not ended, f"it ended with {self.returncode} before a line with {word}: {text}"
            assert time.monotonic() < until, f"no line with {word} in {timeout:g} s: {text}"
            time.sleep(0.02)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for its end; what it printed.

        Raises:
            TimeoutExpired: it did not end in so many seconds, and was killed.
        """
        self._process.join(timeout)
        late = self.returncode is None
        if late:
            self.kill()
            self._process.join()
        text = self._said.read_text()
        self._said.unlink()
        if late:
            raise subprocess.TimeoutExpired("tilewright", timeout, text)
        return text, None


def call_in_fork(
    module: str,
    on_line: Callable[[str], object] = print,
    environ: Mapping[str, str] | None = None,
    on_start: Callable[[Command], object] = lambda _: None,
    **arguments: object,
) -> Any:
    """In the place of `tilewright.core.subprocess_call.call_module`: the same module with the same arguments.

    Raises:
        AssertionError: it gave no result.
    """
    request = json.dumps({"level": 20, "arguments": arguments, "parent": _PARENT})
    command = Command([request], module=module, environ=environ)
    on_start(command)
    said, _ = command.communicate(timeout=240)
    lines = said.splitlines()
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    for line in lines:
        if not line.startswith("{"):
            on_line(line)
    assert answers, f"python -m {module} ended with {command.returncode}: {said}"
    assert "result" in answers[-1], answers[-1]
    return answers[-1]["result"]


def workers_from_fork_server(patch: pytest.MonkeyPatch) -> None:
    """Workers of `data build` begin with everything imported: each takes a second of imports otherwise. They do not
    watch this process, whose children they are not."""
    from tilewright.data.engine.executors.local_executor import LocalExecutor

    def pool_of(executor: LocalExecutor, num: int | None) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(num or executor._processes, fork_server())

    patch.setattr(LocalExecutor, "pool_of", pool_of)


_PARENT = "the fork server"


def _main(args: list[str], module: str, leads: bool, environ: dict[str, str], said: str) -> None:
    args = [arg.replace(json.dumps(_PARENT), str(os.getppid())) for arg in args]
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    # Whole blocks and lines, as to a pipe.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.fsync = not_waited_for  # this process is the test's own
    os.environ.clear()
    os.environ.update(environ)
    if leads:
        os.setsid()
    current_process()._config["daemon"] = False  # so that it may have processes of its own, as at a terminal
    if module:
        sys.argv = [module, *args]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        from tilewright.cli.app import main

        main(args)
    sys.stdout.flush()

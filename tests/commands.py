"""A command of ours in a process of its own, which begins with everything imported: it is under way in a tenth of a
second, where `python -m tilewright` imports for three."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import fork_server


class Command:
    """A process that runs a command line; what tests use of `subprocess.Popen`.

    Args:
        args: after `tilewright`, as typed.
    """

    def __init__(self, args: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile("w", delete=False) as said:
            self._said = Path(said.name)
        self._process = fork_server().Process(target=_main, args=(list(args), said.name), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

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


def _main(args: list[str], said: str) -> None:
    file = os.open(said, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    # Whole blocks and lines, as to a pipe.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    from tilewright.cli.app import main

    main(args)

"""A process that runs what is not trusted: programs and patterns of model folders, parsers of odd documents.

A template may ask for a string of gigabytes, a pattern may backtrack for hours, a parser may loop; none of them can be
interrupted from within. The process gets processor seconds and address space for each request. It serves many: to start
one takes a quarter of a second. One of each kind belongs to each process that asks.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilewright.core import env

_WALL = 20
"""Seconds of the clock for one processor second: a process that waits so long hangs for another reason."""


_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"}
"""Threads take address space from what is limited."""
_UNKNOWN = {"unknown": True}


class KilledError(Exception):
    """A request to a limited process took more than it was given. `signal` ended the process; 0: it ended by itself."""

    def __init__(self, number: int):
        super().__init__(f"ended by signal {number}")
        self.signal = number


class LimitedProcess:
    """A process under limits for what is not trusted, started when it is first asked and again after it ended.

    Args:
        module: that is run; its main calls `serve`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._known: set[str] = set()

    def call(
        self, cpu_s: float, memory_bytes: int, key: str, given: Callable[[], dict[str, Any]], **request: Any
    ) -> dict[str, Any]:
        """The one answer of the limited process to a request. Threads take turns.

        Args:
            cpu_s: processor seconds that it may take.
            memory_bytes: address space that the process may have.
            key: of what the request is about; the process keeps it from one request to the next.
            given: what the process is told of it the first time, and after it was started again.
            request: what is asked.

        Raises:
            KilledError: it took more.
        """
        with self._lock:
            found = self._told(cpu_s, memory_bytes, key, given, request)
            if found == [{"killed": signal.SIGKILL}]:  # by others: no limit ends it so
                found = self._told(cpu_s, memory_bytes, key, given, request)
        if len(found) != 1 or "killed" in found[0]:
            raise KilledError(found[-1].get("killed", 0) if found else 0)
        return found[0]

    def _told(
        self, cpu_s: float, memory_bytes: int, key: str, given: Callable[[], dict[str, Any]], request: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """The answers of a limited process that knows what the request is about."""
        self._running()
        found = [_UNKNOWN]
        if key in self._known:
            found = list(self.ask(cpu_s, memory_bytes, key=key, **request))
        if found == [_UNKNOWN]:  # or it has forgotten
            self._known.add(key)
            found = list(self.ask(cpu_s, memory_bytes, key=key, given=given(), **request))
        return found

    def ask(self, cpu_s: float, memory_bytes: int, **request: Any) -> Iterator[dict[str, Any]]:
        """The answers of the limited process, item by item, with {"killed": signal} last where it was ended.

        Args:
            cpu_s: processor seconds that it may take.
            memory_bytes: address space that it may have.
            request: what the module's `answer` understands.
        """
        child = self._running()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"cpu_s": cpu_s, "memory_bytes": memory_bytes, **request}).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:  # it was ended while it waited
            yield {"killed": self._end()}
            return
        finished = False
        try:
            for line in self._lines(child, _WALL * cpu_s + 60):
                item = json.loads(line)
                if "done" in item:
                    finished = True
                    return
                yield item
            finished = True
            yield {"killed": self._end()}
        finally:
            if not finished:  # the caller wants no more of it: what is still to come belongs to no later request
                child.kill()
                self._end()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            self._known.clear()
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # parsers warn of damage by the thousand
                env=env.importing(Path(__file__).parents[3]) | _ONE_THREAD,
            )
        return self._child

    def _lines(self, child: "subprocess.Popen[bytes]", wait_s: float) -> Iterator[bytes]:
        assert child.stdout is not None
        held: list[bytes] = []
        while select.select([child.stdout], [], [], wait_s)[0]:
            piece = os.read(child.stdout.fileno(), 1 << 20)
            if not piece:
                return
            first, *rest = piece.split(b"\n")
            held.append(first)
            for line in rest:
                yield b"".join(held)
                held = [line]

    def _end(self) -> int:
        """End the limited process for sure; the signal that ended it, 0 where it ended by itself."""
        child, self._child = self._child, None
        if child is None:
            return 0
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # the rest of a request that it did not take
                    continue
        return max(0, -child.returncode)


class Kept:
    """The newest subjects that the process was given, by key.

    Args:
        make: of what `LimitedProcess.call` was given.
        number: that is kept.
    """

    def __init__(self, make: Callable[[dict[str, Any]], Any], number: int):
        self._make, self._number, self._found = make, number, dict[str, Any]()

    def of(self, request: dict[str, Any]) -> Any:
        """The subject of a request that a limited process keeps; None where it has to be sent again."""
        if "given" in request:
            while len(self._found) >= self._number:
                self._found.pop(next(iter(self._found)))
            self._found[request["key"]] = self._make(request["given"])
        return self._found.get(request["key"])

    def unknown(self) -> dict[str, Any]:
        """The answer of a limited process that does not know a request's subject, and asks for it again."""
        return dict(_UNKNOWN)


def serve(answer: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> None:
    """Serve requests in the limited process: one answer per line until the input ends."""
    warnings.simplefilter("ignore")
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        asked = request["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (asked if most == resource.RLIM_INFINITY else min(asked, most), most))
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])  # its signal ends the process, wherever it is
        for item in answer(request):
            sys.stdout.write(json.dumps(item) + "\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write('{"done": true}\n')
        sys.stdout.flush()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))  # to read the next request

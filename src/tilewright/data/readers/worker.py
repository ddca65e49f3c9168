"""A process that parses HTML and PDF, so that a document that hangs its parser, or eats memory, ends that one alone.

An HTML parser takes minutes for a megabyte of open tags, and a Python loop in a PDF may never end; neither can be
interrupted from within. The process gets processor seconds and address space for each document. It serves many: to
start one takes a quarter of a second. One belongs to each process that reads.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilewright.core import env
from tilewright.data.readers.damage import PARSER_ERRORS, failure
from tilewright.data.readers.text import parse

_WALL = 20
"""Seconds of the clock for one processor second: a process that waits so long hangs for another reason."""


class ParserProcess:
    """The process, started when it is first asked and again after it ended."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, cpu_s: int, memory_bytes: int, **request: Any) -> Iterator[dict[str, Any]]:
        """What the parser says, item by item, with {"killed": signal} last where it was ended.

        Args:
            cpu_s: processor seconds that it may take.
            memory_bytes: address space that it may have.
            request: "kind" html or pdf, and the arguments of the function in `parse`.
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
            command = [sys.executable, "-P", "-W", "ignore", "-m", "tilewright.data.readers.worker"]
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # parsers warn of damage by the thousand
                env=env.importing(Path(__file__).parents[3]),
            )
        return self._child

    def _lines(self, child: "subprocess.Popen[bytes]", wait_s: float) -> Iterator[bytes]:
        assert child.stdout is not None
        held = b""
        while select.select([child.stdout], [], [], wait_s)[0]:
            piece = os.read(child.stdout.fileno(), 1 << 20)
            if not piece:
                return
            *whole, held = (held + piece).split(b"\n")
            yield from whole

    def _end(self) -> int:
        """Make sure that it is gone; the signal that ended it, 0 where it ended by itself."""
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


@lru_cache(maxsize=1)
def parser_process(pid: int) -> ParserProcess:
    """The parser of the process `pid`, which must be the caller's: after a fork, the child gets one of its own."""
    assert pid == os.getpid()
    return ParserProcess()


def _answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        if request["kind"] == "html":
            yield parse.html_document(request["html"])
        else:
            yield from parse.pdf_pages(request["path"], request["max_pages"], request["max_bytes"])
    except PARSER_ERRORS as error:
        yield {"error": failure(error)}


def main() -> None:
    """In the process: answer one request a line until the input ends."""
    warnings.simplefilter("ignore")
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], most))
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])  # its signal ends the process, wherever it is
        for item in _answer(request):
            sys.stdout.write(json.dumps(item) + "\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write('{"done": true}\n')
        sys.stdout.flush()


if __name__ == "__main__":
    main()

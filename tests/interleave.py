"""Threads that run line by line in an order that is given, so that a race is a case and not luck.

    interleave([call_a, call_b], order=[0, 0, 1, 0, 1, 1], files=[module.__file__])

Each function runs in a thread of its own. Before each line of the given files it waits for its turn; the next turn is
that of the thread that `order` names, where it still runs. After the end of the order, threads take turns. One that
does not come to its next line, because it waits for a lock that another holds, loses its turn.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE_S = 0.003
"""How long a line may take before others go on."""


class _Turns:
    """Whose line is next."""

    def __init__(self, count: int, order: Iterable[int]):
        self._order = iter(order)
        self._running = set(range(count))
        self._waiting: set[int] = set()
        self._changed = threading.Condition()
        self._turn = 0
        self._choose()

    def _choose(self) -> None:
        wanted = next((number for number in self._order if number in self._running), None)
        later = sorted(self._running, key=lambda number: (number <= self._turn, number))
        self._turn = wanted if wanted is not None else later[0] if later else -1

    def next_line(self, number: int, *, has_run: bool) -> None:
        """Give the turn on, where this thread has run a line, and wait for the next one."""
        with self._changed:
            self._waiting.add(number)
            if has_run and self._turn == number:
                self._choose()
                self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._turn == number, timeout=PATIENCE_S):
                if self._turn not in self._waiting:
                    self._turn = number
            self._waiting.discard(number)

    def end(self, number: int) -> None:
        """This thread has run its last line."""
        with self._changed:
            self._running.discard(number)
            if self._turn == number:
                self._choose()
            self._changed.notify_all()


def interleave(functions: Sequence[Callable[[], Any]], order: Iterable[int], files: Sequence[str]) -> list[Any]:
    """What the functions return; an exception of one is raised here."""
    turns = _Turns(len(functions), order)

    def run(number: int) -> Any:
        def line(frame, event, arg):
            if event == "line":
                turns.next_line(number, has_run=True)
            return line

        def call(frame, event, arg):
            return line if frame.f_code.co_filename in files else None

        turns.next_line(number, has_run=False)
        sys.settrace(call)
        try:
            return functions[number]()
        finally:
            sys.settrace(None)
            turns.end(number)

    with ThreadPoolExecutor(len(functions)) as pool:
        started = [pool.submit(run, number) for number in range(len(functions))]
        return [one.result(timeout=120) for one in started]

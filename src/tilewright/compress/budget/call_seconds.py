"""Seconds of short calls on this machine, with their spread; measured again where they are unsteady, and then said.

On one thread the clock is the thread's own processor time, which other processes do not lengthen; on several it is the
wall's, since the time of threads together is no latency.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

_REPEATS = 9
_AGAIN = 3
"""Times that an unsteady call is measured at most."""
_STEADY = 0.1
"""Largest spread of a steady call."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Seconds:
    """Measured seconds of a call.

    Args:
        least: of all repeats; what else runs on the machine only adds.
        spread: median of the last repeats over the least, less one.
        steady: whether the spread was at most 10 %, at last.
    """

    least: float
    spread: float
    steady: bool

    def to_json(self) -> dict[str, float | bool]:
        """Seconds of a call as plain types."""
        return asdict(self)

    def beside(self, later: "Seconds") -> "Seconds":
        """Seconds of both measurements of one call, which was measured again some time later.

        Example:
            >>> Seconds(1.0, 0.0, True).beside(Seconds(1.5, 0.1, True))
            Seconds(least=1.0, spread=0.5, steady=False)
        """
        low, high = sorted((self.least, later.least))
        spread = max(self.spread, later.spread, high / max(low, 1e-9) - 1)
        return Seconds(low, spread, spread <= _STEADY)


def machine_clock() -> tuple[str, Clock]:
    """Name and clock by which calls are timed, for the number of threads that torch computes with."""
    if torch.get_num_threads() == 1:
        return "processor time of one thread", time.thread_time
    return f"wall clock, {torch.get_num_threads()} threads", time.perf_counter


def measure(call: Callable[[], object], clock: Clock) -> Seconds:
    """Time a call: the least seconds, after one that prepares.

    Args:
        call: the same each time.
        clock: seconds.

    Example:
        >>> ticks = iter(range(100))
        >>> measure(lambda: None, lambda: float(next(ticks)))
        Seconds(least=1.0, spread=0.0, steady=True)
    """
    call()
    found: list[float] = []
    for _ in range(_AGAIN):
        last = []
        for _ in range(_REPEATS):
            began = clock()
            call()
            last.append(clock() - began)
        found += last
        spread = statistics.median(last) / max(min(found), 1e-9) - 1
        if spread <= _STEADY:
            break
    return Seconds(min(found), spread, spread <= _STEADY)

"""Seconds of short calls on this machine, with their spread; measured again where they are unsteady, and then said.

On one thread the clock is the thread's own processor time, which other processes do not lengthen; on several it is the
wall's, since the time of threads together is no latency.
"""

import math
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
_TURNS, _TURNS_S, _SURE = 5, 0.3, 0.05
"""Turns of two calls, and seconds of them, at least; largest error of a steady ratio."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Seconds:
    """Measured seconds of a call.

    Args:
        least: of all repeats; what else runs on the machine only adds. Of a call in turns with another one: the seconds
            of that one, times the median ratio.
        spread: median of the last repeats over the least, less one. Of ratios the standard error of their median, as a
            share of it.
        steady: whether the spread was at most 10 %, of ratios 5 %, at last.
    """

    least: float
    spread: float
    steady: bool

    def to_json(self) -> dict[str, float | bool]:
        """Seconds of a call as plain types."""
        return asdict(self)


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


def measure_beside(call: Callable[[], object], other: Callable[[], object], seconds: Seconds, clock: Clock) -> Seconds:
    """Time a call in turns with another one that was timed before: a machine's speed drifts by more than calls differ,
    and two that follow each other meet the same machine.

    Args:
        call: the same each time.
        other: which the call is compared with.
        seconds: of the other one.
        clock: seconds.

    Example:
        >>> ticks = iter(range(100))
        >>> measure_beside(lambda: next(ticks), lambda: None, Seconds(3.0, 0.0, True), lambda: float(next(ticks)))
        Seconds(least=6.0, spread=0.0, steady=True)
    """

    def timed(one: Callable[[], object]) -> float:
        began = clock()
        one()
        return clock() - began

    call()
    other()
    ratios: list[float] = []
    for _ in range(_AGAIN):
        turns, spent = 0, 0.0
        while turns < _TURNS or spent < _TURNS_S:
            mine, theirs = timed(call), timed(other)
            ratios.append(mine / max(theirs, 1e-9))
            turns, spent = turns + 1, spent + mine + theirs
        low, middle, high = statistics.quantiles(ratios, n=4)
        # of a normal distribution the error of the median is 1.25 deviations, and quartiles are 1.35 apart
        spread = 1.25 / 1.35 * (high - low) / math.sqrt(len(ratios)) / max(middle, 1e-9)
        if spread <= _SURE:
            break
    return Seconds(middle * seconds.least, spread, spread <= _SURE)

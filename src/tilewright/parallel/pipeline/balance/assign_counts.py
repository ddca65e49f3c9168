"""The work of micro-batches that `assign` would make, without the documents in them: for millions of equal lengths.

Documents of one cost are interchangeable, so the ones that go to a micro-batch are counted by cost. Each sum is made in
the same order of roundings as in `assign`, and results are equal to its, bit for bit.
"""

import heapq
import math
from collections.abc import Sequence
from operator import mul

import numpy as np

from tilewright.parallel.pipeline.balance.assign import in_order

_FEW = 16
"""Documents per bin up to which they are placed one by one."""


def assigned_work(
    costs_U: np.ndarray, numbers_U: np.ndarray, work_U: np.ndarray, speeds: Sequence[float], count: int
) -> list[list[float]]:
    """Work of each micro-batch, by data rank and in order of passing, where documents are assigned and micro-batches
    have room for all.

    Args:
        costs_U: of documents, each once, rising.
        numbers_U: of documents of that cost.
        work_U: of a document of that cost; documents are put together by their costs.
        speeds: of each data rank, relative to each other.
        count: of micro-batches per data rank.
    """
    exact_costs, exact_work = _Exact(costs_U), _Exact(work_U)
    costs, found = costs_U.tolist(), []
    for of_rank in _spread(costs, numbers_U.tolist(), speeds):
        bins = _spread(costs, of_rank, [1.0] * count)
        ordered = in_order(bins, [exact_costs.sum(one) for one in bins])
        found.append([exact_work.sum(one) for one in ordered])
    return found


def exact_work(work_N: np.ndarray) -> float:
    """Sum of the work of a micro-batch's documents that counts equal ones once; as `math.fsum`, rounded once."""
    work_U, numbers_U = np.unique(work_N, return_counts=True)
    return _Exact(work_U).sum(numbers_U.tolist())


class _Exact:
    """Exact sums of counted assigned values: integers over a power of two, so that only the quotient is rounded."""

    def __init__(self, values_U: np.ndarray) -> None:
        ratios = [float(value).as_integer_ratio() for value in values_U]
        self._unit = max((under for _, under in ratios), default=1)
        self._over = [over * (self._unit // under) for over, under in ratios]

    def sum(self, numbers: Sequence[int]) -> float:
        """Sum of the values, each as many times."""
        return sum(map(mul, self._over, numbers)) / self._unit


def _spread(costs: Sequence[float], numbers: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Numbers of assigned documents of each cost by bin: the most expensive first, each to the bin that would be
    through first."""
    through, bins = [0.0] * len(speeds), [[0] * len(costs) for _ in speeds]
    for place in range(len(costs) - 1, -1, -1):
        number = numbers[place]
        if number:
            fill = _at_once if number > _FEW * len(speeds) and costs[place] else _one_by_one
            steps = [costs[place] / speed for speed in speeds]
            for one, taken in zip(bins, fill(through, steps, number), strict=True):
                one[place] = taken
    return bins


def _one_by_one(through: list[float], steps: Sequence[float], number: int) -> list[int]:
    """Assign so many equal documents to bins, one by one; `through` is brought forward."""
    taken = [0] * len(through)
    heap = [(at, place) for place, at in enumerate(through)]
    heapq.heapify(heap)
    for _ in range(number):
        at, place = heap[0]
        taken[place] += 1
        heapq.heapreplace(heap, (at + steps[place], place))
    for at, place in heap:
        through[place] = at
    return taken


def _at_once(through: list[float], steps: Sequence[float], number: int) -> list[int]:
    """Assign so many equal documents to bins as `_one_by_one`: they take the first of all times at which bins are
    through, and of equal times that of the first bin."""
    level, beyond = _level(through, steps, number), 3
    while True:
        times = [
            _times(at, step, min(number, max(0, int((level - at) / step)) + beyond))
            for at, step in zip(through, steps, strict=True)
        ]
        taken = _first(times, number)
        if all(one < len(found) for one, found in zip(taken, times, strict=True)):
            break
        beyond *= 2  # sums that are rounded, or do not move at all, come later than their level
    through[:] = [float(found[one]) for one, found in zip(taken, times, strict=True)]
    return taken


def _level(through: Sequence[float], steps: Sequence[float], number: int) -> float:
    """About the time at which bins are through with so many equal documents assigned: those bins that are through
    before it take them."""
    level, done, rate = math.inf, 0.0, 0.0
    for at, step in sorted(zip(through, steps, strict=True)):
        if at >= level:
            break
        done, rate = done + at / step, rate + 1 / step
        level = (number + done) / rate
    return level


def _first(times: Sequence[np.ndarray], number: int) -> list[int]:
    """How many of the first so many of all times at which documents are assigned each bin has."""
    together = np.concatenate(times)
    if len(together) < number:
        return [len(one) for one in times]
    last = np.partition(together, number - 1)[number - 1]
    taken = [int(np.searchsorted(one, last, "left")) for one in times]
    left = number - sum(taken)
    for place, one in enumerate(times):
        equal = min(left, int(np.searchsorted(one, last, "right")) - taken[place])
        taken[place] += equal
        left -= equal
    return taken


def _times(at: float, step: float, more: int) -> np.ndarray:
    """Times at which an assigned bin is through, after each of so many steps: sums one after the other."""
    found = np.full(more + 1, step)
    found[0] = at
    return np.add.accumulate(found)

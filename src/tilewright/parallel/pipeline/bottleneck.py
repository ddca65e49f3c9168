"""A list cut into consecutive parts for workers of different speeds, such that the slowest is through as early as it
can be. No torch.

A limit on the seconds is sought by halving. Whether a cut keeps to a limit takes one pass over the parts: the ends that
a part may have are intervals of entries, and follow from those of the part before.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_EXACT = 1e-9
"""Share of the seconds by which a better cut may be missed: what rounding of sums is far below of."""
Interval = tuple[int, int]
"""First and last number."""


@dataclass(frozen=True)
class PartWorker:
    """The worker of one part."""

    speed: float = 1.0
    load: float = 0.0
    """What it does beside the part."""
    least: int = 1
    """Entries."""
    most: int = 2**62


@dataclass(frozen=True)
class Cut:
    """Entries to cut, and who works on the parts.

    Example:
        >>> Cut((5, 1, 1, 1, 4, 2), (PartWorker(),) * 3).best()
        (2, 3, 1)
        >>> Cut((1,) * 8, (PartWorker(), PartWorker(speed=0.6))).best()
        (5, 3)
    """

    costs: Sequence[float]
    """Of the entries, in their order, 0 or more."""
    workers: Sequence[PartWorker]

    @cached_property
    def _sums(self) -> list[float]:
        """Sums of a list before each entry, for the cut of least bottleneck."""
        found = [0.0]
        for cost in self.costs:
            found.append(found[-1] + cost)
        return found

    def best(self, limit: float | None = None) -> tuple[int, ...] | None:
        """Cut a list of entries into parts so that the slowest worker takes least; returns the number of entries of
        each part. None if parts take more or fewer entries than there are, or if none is within the limit.

        Args:
            limit: of the seconds; None: any.
        """
        if limit is None:
            limit = 1.001 * (self._sums[-1] + max(one.load for one in self.workers))
            limit /= min(one.speed for one in self.workers)
        found = self._within(limit)
        if found is None:
            return None
        low, high = 0.0, self.seconds(found)
        while high - low > _EXACT * high:
            middle = (low + high) / 2
            better = self._within(middle)
            if better is None:
                low = middle
            else:
                found, high = better, min(middle, self.seconds(better))
        return found

    def seconds(self, counts: Sequence[int]) -> float:
        """Seconds of the slowest worker, a cut's bottleneck."""
        found, start = 0.0, 0
        for worker, count in zip(self.workers, counts, strict=True):
            work = self._sums[start + count] - self._sums[start]
            found, start = max(found, (work + worker.load) / worker.speed), start + count
        return found

    def _within(self, limit: float) -> tuple[int, ...] | None:
        """A cut within a bottleneck, with which no worker takes longer, or None; parts are as equal as the limit lets
        them be."""
        reached: list[list[Interval]] = [[(0, 0)]]
        for worker in self.workers:
            room = limit * worker.speed - worker.load
            reached.append(_joined(self._next(starts, worker, room) for starts in reached[-1]))
        end = len(self.costs)
        if not any(low <= end <= high for low, high in reached[-1]):
            return None
        counts = []
        for number in range(len(self.workers) - 1, -1, -1):
            start = self._start(end, number, limit, reached[number])
            counts.append(end - start)
            end = start
        return tuple(reversed(counts))

    def _next(self, starts: Interval, worker: PartWorker, room: float) -> Iterator[Interval]:
        """Ends of a part of a cut that begins at one of these entries, within the bottleneck."""
        low, high = starts[0], min(starts[1], len(self.costs) - worker.least)
        begin = low
        while begin <= high:
            while begin <= high and not self._fits(begin, begin + worker.least, room):
                begin += 1
            last = begin
            while last < high and self._fits(last + 1, last + 1 + worker.least, room):
                last += 1
            if begin <= high:
                yield begin + worker.least, self._end(last, worker, room)
            begin = last + 1

    def _fits(self, start: int, end: int, room: float) -> bool:
        return self._sums[end] <= self._sums[start] + room

    def _end(self, start: int, worker: PartWorker, room: float) -> int:
        """The last end of a part of a cut that begins here, within the bottleneck."""
        return min(bisect_right(self._sums, self._sums[start] + room) - 1, start + worker.most)

    def _start(self, end: int, number: int, limit: float, reached: Sequence[Interval]) -> int:
        """The start of a part of a cut that ends here, within the bottleneck: as near as may be to where it would take
        as long as those before it."""
        worker, before = self.workers[number], self.workers[: number + 1]
        level = (self._sums[end] + sum(one.load for one in before)) / sum(one.speed for one in before)
        wanted = bisect_left(self._sums, self._sums[end] - level * worker.speed + worker.load - _EXACT * level)
        room, found = limit * worker.speed - worker.load, []
        for low, high in reached:
            first, last = max(low, end - worker.most), min(high, end - worker.least)
            while first <= last and self._end(first, worker, room) < end:
                first += 1
            if first <= last:
                found.append(min(max(wanted, first), last))
        return min(found, key=lambda start: abs(start - wanted))


def _joined(groups: Iterator[Iterator[Interval]]) -> list[Interval]:
    """Intervals of a cut in their order, those that meet joined as one."""
    found: list[Interval] = []
    for low, high in sorted(one for group in groups for one in group):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found

"""Layers over stages by what they cost and how fast ranks are. No torch.

A rank's time for a micro-batch is that of its stages. Layers are dealt out as if all cost the same, each to the rank
that would be through first. Where they differ, stages that lie behind each other on different ranks are then cut again
(`bottleneck.Cut`), while the others stay, and single layers moved, for as long as that helps. So no split has a faster
slowest rank where ranks have one stage each, or where layers cost the same; elsewhere none that differs by such a step.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tilewright.parallel.pipeline.bottleneck import Cut, PartWorker

_BETTER = 1 - 1e-9
"""Of the seconds: what is less than that better is rounding."""


@dataclass(frozen=True)
class SplitCosts:
    """The costs that a split of layers over stages is made for."""

    layers: Sequence[float]
    """Seconds of each layer for a usual micro-batch, on a rank of speed 1."""
    rank_of: Sequence[int]
    """The rank of each stage."""
    speeds: Sequence[float]
    """Of each rank in the row."""
    first: float = 0.0
    """Seconds of the embedding."""
    last: float = 0.0
    """Seconds of head and loss."""
    most: int | None = None
    """Layers that a rank has memory for; None: any number."""

    @cached_property
    def loads(self) -> list[float]:
        """The seconds of each rank that a new split of the layers does not move: the embedding of the first stage, the
        head of the last."""
        found = [0.0] * len(self.speeds)
        found[self.rank_of[0]] += self.first
        found[self.rank_of[-1]] += self.last
        return found

    @cached_property
    def blocks(self) -> list[range]:
        """Blocks of a split: consecutive stages on one rank."""
        found, start = [], 0
        for _, of_rank in itertools.groupby(self.rank_of):
            found.append(range(start, start := start + len(list(of_rank))))
        return found

    def rank_seconds(self, split: Sequence[int]) -> list[float]:
        """Seconds of each rank under a split, for a micro-batch.

        Example:
            >>> SplitCosts((1.0,) * 4, rank_of=(0, 1), speeds=(1.0, 0.5)).rank_seconds((3, 1))
            [3.0, 2.0]
        """
        seconds, start = list(self.loads), 0
        for stage, count in enumerate(split):
            seconds[self.rank_of[stage]] += sum(self.layers[start : start + count])
            start += count
        return [of_rank / speed for of_rank, speed in zip(seconds, self.speeds, strict=True)]

    def slowest_s(self, split: Sequence[int]) -> float:
        """Seconds of the slowest rank under a split."""
        return max(self.rank_seconds(split))

    def held(self, split: Sequence[int]) -> list[int]:
        """Layers that each rank holds under a split of stages."""
        found = [0] * len(self.speeds)
        for rank, count in zip(self.rank_of, split, strict=True):
            found[rank] += count
        return found


def best_split(costs: SplitCosts) -> tuple[int, ...]:
    """Find the layers per stage with the least time of the slowest rank.

    Args:
        costs: of layers and ranks; as many layers as stages at least, for which ranks have memory.

    Example:
        >>> best_split(SplitCosts((1.0,) * 8, rank_of=(0, 1), speeds=(1.0, 0.6)))
        (5, 3)
        >>> best_split(SplitCosts((5.0, 5.0, 2.0, 2.0, 2.0, 2.0), rank_of=(0, 1), speeds=(1.0, 1.0), last=2.0))
        (2, 4)
    """
    split = _dealt(costs)
    if len(set(costs.layers)) < 2:
        return split
    rows = list(_rows(costs))
    while True:
        split = _rows_cut_again(costs, split, rows)
        moved = _moved(costs, split) if len(rows) > 1 else None
        if moved is None:
            return split
        split = moved


def _rows_cut_again(costs: SplitCosts, split: tuple[int, ...], rows: Sequence[range]) -> tuple[int, ...]:
    """Resplit one row of stages after the other, until none helps."""
    since = 0  # rows that were cut again, and did not help
    for row in itertools.cycle(rows):
        found = _cut_again(costs, split, row)
        split, since = (split, since + 1) if found is None else (found, 0)
        if since == len(rows):
            break
    return split


def _moved(costs: SplitCosts, split: tuple[int, ...]) -> tuple[int, ...] | None:
    """Move one layer from a stage to another, shifting those between them, in the best of all ways: by the slowest
    rank, then by how equal ranks are. None if no such split is better."""
    stages, ranks = len(split), len(costs.speeds)
    giver_MS, taker_MS, stage_MS = np.meshgrid(*3 * [np.arange(stages)], indexing="ij")
    shift_MS = 1 * ((taker_MS <= stage_MS) & (stage_MS < giver_MS)) - ((giver_MS <= stage_MS) & (stage_MS < taker_MS))
    ends_MS = (np.cumsum(split) + shift_MS).reshape(-1, stages)
    counts_MS = np.diff(ends_MS, axis=1, prepend=0)
    rank_SR = np.asarray(costs.rank_of)[:, None] == np.arange(ranks)
    most = len(costs.layers) if costs.most is None else costs.most
    counts_MS = counts_MS[(counts_MS.min(1) >= 1) & ((counts_MS @ rank_SR).max(1) <= most)]
    sums_L = np.cumsum((0.0, *costs.layers))
    work_MS = np.diff(sums_L[np.cumsum(counts_MS, axis=1)], axis=1, prepend=0.0)
    seconds_MR = (work_MS @ rank_SR + costs.loads) / costs.speeds
    slowest_M, unequal_M = seconds_MR.max(1), (seconds_MR * seconds_MR).sum(1)
    now = np.asarray(costs.rank_seconds(split))
    slowest, unequal = now.max(), (now * now).sum()
    better_M = (slowest_M < _BETTER * slowest) | ((slowest_M <= slowest) & (unequal_M < _BETTER * unequal))
    if not better_M.any():
        return None
    best = np.lexsort((unequal_M, slowest_M, ~better_M))[0]
    return tuple(counts_MS[best].tolist())


def _dealt(costs: SplitCosts) -> tuple[int, ...]:
    """Split layers over stages as if all cost the same, a rank's as many in each of its stages."""
    each, count = sum(costs.layers) / len(costs.layers), len(costs.layers)
    stages = [[stage for stage, of in enumerate(costs.rank_of) if of == rank] for rank in range(len(costs.speeds))]
    held = [len(of) for of in stages]
    most = count if costs.most is None else costs.most

    def through(rank: int) -> tuple[float, int, int]:
        """When a rank would finish with one layer more; of ranks that finish at the same time, the earlier stage comes
        first."""
        return (costs.loads[rank] + each * (held[rank] + 1)) / costs.speeds[rank], stages[rank][0], rank

    waiting = [through(rank) for rank in range(len(held)) if held[rank] < most]
    heapq.heapify(waiting)
    for _ in range(count - sum(held)):
        rank = waiting[0][2]
        held[rank] += 1
        if held[rank] < most:
            heapq.heapreplace(waiting, through(rank))
        else:
            heapq.heappop(waiting)
    split = [0] * len(costs.rank_of)
    for number, of in zip(held, stages, strict=True):
        for stage, part in zip(of, _evenly(number, len(of)), strict=True):
            split[stage] = part
    return tuple(split)


def _rows(costs: SplitCosts) -> Iterator[range]:
    """Rows of consecutive blocks of a split on different ranks, as many as start at each block."""
    end = 0
    for start in range(len(costs.blocks)):
        ranks = [costs.rank_of[block[0]] for block in costs.blocks[start:]]
        size = next((i for i, rank in enumerate(ranks) if rank in ranks[:i]), len(ranks))
        if start + size > end:
            end = start + size
            yield range(start, end)


def _cut_again(costs: SplitCosts, split: tuple[int, ...], row: range) -> tuple[int, ...] | None:
    """A resplit that is faster, with other layers in these blocks, which have as many together; None where there is
    none."""
    blocks = [costs.blocks[number] for number in row]
    first, end = blocks[0].start, blocks[-1].stop
    start, stop = sum(split[:first]), sum(split[:end])
    beside = [count if not first <= stage < end else 0 for stage, count in enumerate(split)]
    held = costs.held(beside)
    loads, place = list(costs.loads), 0
    for stage, count in enumerate(split):
        if beside[stage]:
            loads[costs.rank_of[stage]] += sum(costs.layers[place : place + count])
        place += count
    most = len(costs.layers) if costs.most is None else costs.most
    ranks = [costs.rank_of[block[0]] for block in blocks]
    workers = [
        PartWorker(costs.speeds[rank], loads[rank], len(block), most - held[rank])
        for rank, block in zip(ranks, blocks, strict=True)
    ]
    counts = Cut(costs.layers[start:stop], workers).best(_BETTER * costs.slowest_s(split))
    if counts is None:
        return None
    parts = [part for count, block in zip(counts, blocks, strict=True) for part in _evenly(count, len(block))]
    return (*split[:first], *parts, *split[end:])


def _evenly(count: int, parts: int) -> list[int]:
    """Split layers evenly: as many in each stage, one more in the first ones."""
    least, more = divmod(count, parts)
    return [least + (part < more) for part in range(parts)]


def common_split(rows: Sequence[SplitCosts], now: Sequence[int], *, by_speed: bool) -> tuple[int, ...]:
    """Choose one split for all rows of ranks, with the least time of a step. The candidates are the best splits for the
    speeds of each row, for the slowest and the mean rank of each stage, and the present split.

    Args:
        rows: the same layers, each with the speeds of a row.
        now: layers per stage.
        by_speed: documents are placed by the speed of rows; else all rows get as much.

    Example:
        >>> rows = [SplitCosts((1.0,) * 8, (0, 1), speeds) for speeds in ((1.0, 1.0), (1.0, 0.6))]
        >>> [common_split(rows, (4, 4), by_speed=by_speed) for by_speed in (True, False)]
        [(4, 4), (5, 3)]
    """
    speeds = [tuple(row.speeds) for row in rows]
    ranks = list(zip(*speeds, strict=True))
    more = tuple(map(min, ranks)), tuple(math.fsum(of) / len(rows) for of in ranks)
    tried = [tuple(now), *(best_split(replace(rows[0], speeds=of)) for of in dict.fromkeys((*speeds, *more)))]
    return min(tried, key=lambda split: rows_s(rows, split, by_speed=by_speed))


def rows_s(rows: Sequence[SplitCosts], split: Sequence[int], *, by_speed: bool) -> float:
    """Seconds per row under a common split for a micro-batch, see `common_split`."""
    found = {tuple(row.speeds): row.slowest_s(split) for row in rows}
    seconds = [found[tuple(row.speeds)] for row in rows]
    return len(rows) / math.fsum(1 / one for one in seconds) if by_speed else max(seconds)


@dataclass(frozen=True)
class SplitMove:
    """A move to another split of layers over stages, and what it is for."""

    split: tuple[int, ...]
    """Layers per stage."""
    before_s: float
    """For a micro-batch per row."""
    after_s: float

    @property
    def gain(self) -> float:
        """Share of the time that the new split of layers saves."""
        return 1 - self.after_s / self.before_s


def worth(
    rows: Sequence[SplitCosts], now: Sequence[int], *, by_speed: bool, steps_left: int, step_s: float, move_s: float
) -> SplitMove | None:
    """Return the better split if it is worth the move: the steps that are left save more than twice what the move
    takes; else None.

    Args:
        rows, now, by_speed: see `common_split`.
        steps_left: of the run.
        step_s: seconds of a step.
        move_s: seconds of the move.
    """
    if not any(rows[0].layers):  # all that was measured is beside them
        return None
    split = common_split(rows, now, by_speed=by_speed)
    move = SplitMove(split, rows_s(rows, now, by_speed=by_speed), rows_s(rows, split, by_speed=by_speed))
    return move if move.gain >= 0.03 and steps_left * step_s * move.gain > 2 * move_s else None

"""Which documents of a step share a micro-batch, on which data rank, and in what order they pass. No exchange.

What goes in is what all ranks have agreed on, so all of them get the same assignment. Documents go from
the most expensive to the cheapest, each to the micro-batch that would be through first (LPT, Graham 1969: at most a
third above the best); a micro-batch of a slow rank is through later, so it gets less. The cheapest micro-batches pass
first and last: while a pipeline fills and drains, ranks wait for as long as those take. Ranks that meet in each layer's
collectives (FSDP2) have equally expensive ones at the same time.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from tilewright.parallel.pipeline.assignment import Room
from tilewright.parallel.pipeline.stage_split import Pipeline

T = TypeVar("T")
Places = list[list[list[int]]]
"""Numbers of documents by data rank, micro-batch, and place in it. Each rank has as many micro-batches."""


@dataclass(frozen=True)
class WeighedDocuments:
    """Documents of a step with their costs, in the order of the stream.

    Example:
        >>> WeighedDocuments(lengths=(3, 5), costs=(3.0, 5.0)).total
        8.0
    """

    lengths: Sequence[int]
    """Tokens of each."""
    costs: Sequence[float]
    """Seconds that each takes, or what is proportional to them."""

    @cached_property
    def total(self) -> float:
        """Sum of the costs of documents to assign, which does not depend on how it is added up."""
        return math.fsum(self.costs)


@dataclass(frozen=True)
class RowShape:
    """The shape of the pipeline that micro-batches of documents pass.

    Example:
        >>> documents = WeighedDocuments((1,) * 64, (1.0,) * 64)
        >>> [RowShape(ranks=4).seconds(documents, (1.0,), count, 0.0) for count in (8, 16)]
        [88.0, 76.0]
    """

    ranks: int = 1
    """In a row."""
    filled_in: float = 1.0
    """How much less time the pipeline takes to fill and drain than under 1F1B."""
    most: int = 256
    """Micro-batches per data rank, where they need not be more."""
    stages: int = 1
    """That each micro-batch passes."""

    @staticmethod
    def of(pipeline: Pipeline) -> "RowShape":
        """The shape of a schedule's pipeline, from which documents are assigned. A zero-bubble schedule leaves a third
        of 1F1B's idle time, an interleaved one 1 / virtual (two thirds of that where weight gradients wait), GPipe all.

        Example:
            >>> RowShape.of(Pipeline(4, "zbv", 2)).filled_in, RowShape.of(Pipeline(4, "interleaved", 2)).filled_in
            (3.0, 2.0)
        """
        filled_in = 1.5 * pipeline.virtual if pipeline.defers else float(pipeline.virtual)
        return RowShape(pipeline.pp, filled_in, stages=pipeline.num_stages)

    def seconds(self, documents: WeighedDocuments, speeds: Sequence[float], count: int, each_s: float) -> float:
        """Seconds of a step of assigned documents in balanced micro-batches, in the unit of the costs: its work, what
        each micro-batch costs beside its documents (`each_s`), the ranks' waiting while the pipeline fills and drains,
        and their waiting for the longest document."""
        work = documents.total / sum(speeds) + count * each_s
        one = work / count
        more = max(0.0, max(documents.costs, default=0.0) / max(speeds) + each_s - one)
        return work + (self.ranks - 1) / self.filled_in * (one + 0.6 * more)


def choose(
    documents: WeighedDocuments,
    speeds: Sequence[float],
    room: Room,
    row: RowShape,
    *,
    each_s: float = 0.0,
    now: int = 0,
    gain: float = 0.05,
) -> Places:
    """Assign documents with the number of micro-batches that takes the least time.

    Args:
        documents: of the step.
        speeds: of each data rank, relative to each other.
        room: what micro-batches may be.
        row: what they pass.
        each_s: what a micro-batch costs beside its documents, in the unit of their costs.
        now: the number of the step before; another one is chosen where it saves more than `gain`; 0: none.
        gain: share of the step's time.
    """
    fewest = room.next_count(math.ceil(sum(documents.lengths) / (room.ranks * room.tokens)))
    most = min(row.most, len(documents.lengths) // room.ranks)
    counts = [fewest, *(count for count in range(fewest + 1, most + 1) if room.takes(count))]
    took = {count: row.seconds(documents, speeds, count, each_s) for count in counts}
    ranked = sorted(counts, key=lambda count: (took[count], count))
    if now in took and took[now] <= (1 + gain) * took[ranked[0]]:
        ranked = [now, *(count for count in ranked if count != now)]
    for count in ranked:
        found = assign(documents, speeds, count, room.tokens)
        if found is not None:
            return found
    count = counts[-1]
    while True:  # as many as documents do at the latest
        count = room.next_count(count + 1)
        found = assign(documents, speeds, count, room.tokens)
        if found is not None:
            return found


def assign(documents: WeighedDocuments, speeds: Sequence[float], count: int, max_tokens: int) -> Places | None:
    """Assign documents to `count` micro-batches per data rank; None where they do not go into so many.

    Args:
        documents: of the step.
        speeds: of each data rank, relative to each other.
        count: of micro-batches per data rank.
        max_tokens: of a micro-batch; no document has more.

    Example:
        >>> assign(WeighedDocuments((9, 1, 5, 4), (9.0, 1.0, 5.0, 4.0)), speeds=(1.0,), count=2, max_tokens=16)
        [[[2, 3], [0, 1]]]
    """
    falling = sorted(range(len(documents.lengths)), key=documents.costs.__getitem__, reverse=True)  # stable
    ranks = _filled(documents, falling, speeds, [count * max_tokens] * len(speeds))
    found: Places = []
    for of_rank in ranks or ():
        bins = _filled(documents, of_rank, [1.0] * count, [max_tokens] * count)
        if bins is None:
            return None
        costs = [math.fsum(documents.costs[i] for i in one) for one in bins]
        found.append([sorted(one) for one in in_order(bins, costs)])
    return found or None


def in_order(microbatches: Sequence[T], costs: Sequence[float]) -> list[T]:
    """Order micro-batches: the cheapest ones first and last, the most expensive ones in the middle.

    Example:
        >>> in_order("abcde", [5.0, 1.0, 4.0, 2.0, 3.0])
        ['b', 'e', 'a', 'c', 'd']
    """
    rising = sorted(range(len(microbatches)), key=lambda i: (costs[i], i))
    return [microbatches[i] for i in (*rising[0::2], *reversed(rising[1::2]))]


def _filled(
    documents: WeighedDocuments, falling: Sequence[int], speeds: Sequence[float], rooms: Sequence[int]
) -> list[list[int]] | None:
    """Documents assigned to bins; None where one does not go into any.

    Args:
        documents: of the step.
        falling: those to place, the most expensive one first.
        speeds: of each bin.
        rooms: tokens that each bin takes.
    """
    lengths, costs = documents.lengths, documents.costs
    bins: list[list[int]] = [[] for _ in speeds]
    room = list(rooms)
    heap = [(0.0, number) for number in range(len(bins))]
    shortest = min((lengths[i] for i in falling), default=0)
    for document in falling:
        length, aside = lengths[document], []
        while length > room[heap[0][1]]:
            full = heapq.heappop(heap)
            if room[full[1]] >= shortest:
                aside.append(full)
            if not heap:
                return None
        through, number = heap[0]
        bins[number].append(document)
        room[number] -= length
        heapq.heapreplace(heap, (through + costs[document] / speeds[number], number))
        for one in aside:
            heapq.heappush(heap, one)
    return bins

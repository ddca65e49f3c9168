"""Which documents of a step share a micro-batch, on which data rank, and in what order they pass. No torch, no exchange.

What goes in is what all ranks have agreed on, so all of them get the same assignment without a word. Documents go from
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

from tilewright.core.errors import ConfigError

T = TypeVar("T")
Assignment = tuple[tuple[tuple[int, ...], ...], ...]
"""Numbers of documents by data rank, micro-batch, and place in it. Each rank has as many micro-batches."""


@dataclass(frozen=True)
class StepDocuments:
    """The documents of a step, in the order of the stream.

    Example:
        >>> StepDocuments(lengths=(3, 5), costs=(3.0, 5.0)).total
        8.0
    """

    lengths: Sequence[int]
    """Tokens of each."""
    costs: Sequence[float]
    """Seconds that each takes, or what is proportional to them."""

    @cached_property
    def total(self) -> float:
        """The sum of the costs, which does not depend on how it is added up."""
        return math.fsum(self.costs)


def assign(documents: StepDocuments, speeds: Sequence[float], count: int, max_tokens: int) -> Assignment | None:
    """Documents over `count` micro-batches per data rank; None where they do not go into so many.

    Args:
        documents: of the step.
        speeds: of each data rank, relative to each other.
        count: of micro-batches per data rank.
        max_tokens: of a micro-batch.

    Example:
        >>> assign(StepDocuments((9, 1, 5, 4), (9.0, 1.0, 5.0, 4.0)), speeds=(1.0,), count=2, max_tokens=16)
        (((2, 3), (0, 1)),)
    """
    rest = sorted(range(len(documents.lengths)), key=documents.costs.__getitem__, reverse=True)  # stable: no ties
    ranks = _filled(documents, rest, speeds, [count * max_tokens] * len(speeds), least=count)
    found = []
    for of_rank in ranks or ():
        bins = _filled(documents, of_rank, [1.0] * count, [max_tokens] * count, least=1)
        if bins is None:
            return None
        costs = [math.fsum(documents.costs[i] for i in one) for one in bins]
        found.append(tuple(tuple(sorted(one)) for one in in_order(bins, costs)))
    return tuple(found) or None


def in_order(microbatches: Sequence[T], costs: Sequence[float]) -> list[T]:
    """The cheapest ones first and last, the most expensive ones in the middle.

    Example:
        >>> in_order("abcde", [5.0, 1.0, 4.0, 2.0, 3.0])
        ['b', 'e', 'a', 'c', 'd']
    """
    rising = sorted(range(len(microbatches)), key=lambda i: (costs[i], i))
    return [microbatches[i] for i in (*rising[0::2], *reversed(rising[1::2]))]


def _filled(
    documents: StepDocuments, falling: Sequence[int], speeds: Sequence[float], rooms: Sequence[int], least: int
) -> list[list[int]] | None:
    """Documents in bins; None where one does not go into any, or a bin has fewer than `least`.

    Args:
        documents: of the step.
        falling: those to place, the most expensive one first.
        speeds: of each bin.
        rooms: tokens that each bin takes.
        least: documents in each bin.
    """
    lengths, costs = documents.lengths, documents.costs
    bins: list[list[int]] = [[] for _ in speeds]
    room = list(rooms)
    heap = [(0.0, number) for number in range(len(bins))]
    shortest = min((lengths[i] for i in falling), default=0)
    for document in falling:
        length, aside = lengths[document], []
        while heap and length > room[heap[0][1]]:
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
    return bins if min(map(len, bins)) >= least else None


@dataclass(frozen=True)
class CountLimits:
    """Numbers of micro-batches that a step may have."""

    max_tokens: int
    """Of a micro-batch: what memory was planned for."""
    stages: int = 1
    """Ranks in a row."""
    virtual: int = 1
    """Stages per rank."""
    most: int = 256
    """Micro-batches per data rank."""
    takes: tuple[int, ...] = ()
    """What the schedule takes; empty: any number."""

    def allowed(self, documents: StepDocuments, ranks: int) -> list[int]:
        """Numbers that come into question for these documents on so many data ranks, rising."""
        fewest = max(1, math.ceil(sum(documents.lengths) / (ranks * self.max_tokens)))
        most = min(self.most, len(documents.lengths) // ranks)
        return [count for count in range(fewest, most + 1) if not self.takes or count in self.takes]

    def seconds(self, documents: StepDocuments, speeds: Sequence[float], count: int, each_s: float) -> float:
        """What a step of balanced micro-batches takes, in the unit of the costs: its work, what each micro-batch costs
        beside its documents (`each_s`), and the ranks' waiting while the pipeline fills and drains.

        Example:
            >>> documents = StepDocuments((1,) * 64, (1.0,) * 64)
            >>> [CountLimits(8, stages=4).seconds(documents, (1.0,), count, 0.0) for count in (8, 16)]
            [88.0, 76.0]
        """
        work = documents.total / sum(speeds) + count * each_s
        one = max(work / count, max(documents.costs, default=0.0) / max(speeds) + each_s)
        return max(work, one) + (self.stages - 1) / self.virtual * (work / count)


def choose(
    documents: StepDocuments,
    speeds: Sequence[float],
    limits: CountLimits,
    *,
    each_s: float = 0.0,
    now: int = 0,
    gain: float = 0.05,
) -> Assignment:
    """The assignment whose number of micro-batches takes the least time.

    Args:
        documents: of the step.
        speeds: of each data rank.
        limits: of the number.
        each_s: what a micro-batch costs beside its documents, in the unit of their costs.
        now: the number of the step before; another one is chosen where it saves more than `gain`; 0: none.
        gain: share of the step's time.

    Raises:
        ConfigError: no number of micro-batches takes these documents.
    """
    allowed = limits.allowed(documents, len(speeds))
    took = {count: limits.seconds(documents, speeds, count, each_s) for count in allowed}
    ranked = sorted(allowed, key=lambda count: (took[count], count))
    if now in took and took[now] <= (1 + gain) * took[ranked[0]]:
        ranked = [now, *(count for count in ranked if count != now)]
    for count in ranked:
        found = assign(documents, speeds, count, limits.max_tokens)
        if found is not None:
            return found
    raise ConfigError(
        "Documents of a step that no number of micro-batches takes",
        got=f"{len(documents.lengths)} documents of {sum(documents.lengths)} tokens on {len(speeds)} data ranks",
        need=f"at least {max(limits.takes[:1] or (1,))} micro-batches per rank, of at most {limits.max_tokens} tokens",
        try_="more documents per step, or --parallel.balance off",
        where="parallel.balance",
    )

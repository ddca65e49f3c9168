"""Which shards are wanted next, in the order of a mixture and within a room of bytes.

Whole windows of shards are wanted: from the one that the next sample is in to as many windows further as there is room
for. The rows of a domain come in one order, whatever the weights are: a move of weights only says which domain comes
sooner. So shards that were read ahead under other weights are kept, since each would be read once more otherwise. Where
they have more than half of the room, or the next block of samples needs it, those go first that come last. An eighth of
the room is left free for what a move brings into the next block, since a shard would go for it otherwise.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import numpy as np

from tilewright.data.batches.mixture_order import BLOCK, Mixture
from tilewright.data.dataset.remote.shard_windows import WindowedOrder

_MOST_BLOCKS = 64  # that are looked at in one call
Window = tuple[int, int, int]
"""Place of the domain, epoch, window."""


class WindowPlan:
    """Decides which shards are wanted next, in the order of a mixture and within a budget of bytes.

    Args:
        sizes: bytes of each shard.
        places: of each domain's shards among all, in the mixture's order of domains.
        order: of rows.
        room: bytes.
    """

    def __init__(self, sizes: Sequence[int], places: Sequence[Sequence[int]], order: WindowedOrder, room: int) -> None:
        self._sizes, self._places, self._order, self._room = sizes, places, order, room
        self._mixture: Mixture | None = None
        self._block = self._head = 0  # of the next sample, and behind the last one that was looked at
        self._is_full = False  # nothing more fits until a window is behind
        self._reached: list[int] = []  # shards of domains that have weight
        self._wanted: dict[Window, list[int]] = {}  # windows in their order, and their shards
        self._uses: Counter[int] = Counter()  # shards of wanted windows
        self._kept: dict[int, Window] = {}  # shards of windows that come later, read under other weights

    def wants(self, place: int) -> bool:
        """True if the plan of windows wants a shard to stay."""
        return place in self._uses or place in self._kept

    def all_wanted(self) -> list[int]:
        """Shards that the plan of windows wants to stay."""
        return [*self._uses, *self._kept]

    def is_other(self, mixture: Mixture, sample: int) -> bool:
        """True if windows come in another order than planned: other weights, or a jump."""
        return mixture is not self._mixture or not self._block <= sample // BLOCK <= self._head

    def follow(self, mixture: Mixture, sample: int, read: Collection[int]) -> list[int] | None:
        """Plan the windows of shards from a sample on.

        Args:
            mixture: of samples.
            sample: the next one.
            read: shards that were read, or are being read.

        Returns:
            Shards to read, in the order in which they are needed, to within a block of samples; those that were read
            are among them. None: as before.
        """
        other = self.is_other(mixture, sample)
        if other:
            self._begin(mixture, sample // BLOCK, read)
        self._block = sample // BLOCK
        counts = self._counts(sample)
        behind = [window for window in self._wanted if self._is_behind(window, counts)]
        for one in behind:
            self._uses.subtract(self._wanted.pop(one))
        self._uses = +self._uses
        self._kept = {place: window for place, window in self._kept.items() if not self._is_behind(window, counts)}
        if self._is_full and self._head > self._block and not behind and not other:
            return None
        self._extend(counts)
        return list(dict.fromkeys(place for places in self._wanted.values() for place in places))

    def clear(self) -> None:
        """Clear the plan of windows: want no shards."""
        self._mixture = None
        self._wanted.clear()
        self._uses.clear()
        self._kept.clear()

    def _begin(self, mixture: Mixture, block: int, read: Collection[int]) -> None:
        """Begin the plan with other windows, which come first; what was read of the others is kept."""
        if self._mixture is None or self._mixture.seed != mixture.seed:
            self._kept.clear()  # other shards are in other windows
        else:
            for window, places in self._wanted.items():
                for place in places:
                    if place in read:
                        self._kept.setdefault(place, window)
        self._wanted.clear()
        self._uses.clear()
        self._mixture, self._head = mixture, block
        weighed = [any(stage.weights[at] for stage in mixture.stages) for at in range(len(self._places))]
        self._reached = [place for at, of in enumerate(self._places) if weighed[at] for place in of]

    def _extend(self, counts: Sequence[int]) -> None:
        """Extend the plan by the windows of the next blocks, as far as there is room; those of the first block in any
        case."""
        for _ in range(_MOST_BLOCKS):
            # 1. The first block is planned even beyond the room, since its samples come next.
            first = self._head == self._block
            self._is_full = not first and all(place in self._uses for place in self._reached)
            if self._is_full:
                return
            # 2. Windows of the block that are not wanted yet, and what their shards add.
            start = counts if first else self._of().counts(self._head * BLOCK)
            new = [
                one
                for one in self._windows(start, self._of().counts((self._head + 1) * BLOCK))
                if one not in self._wanted
            ]
            places = {place for one in new for place in self._shards(one)}
            size = self._bytes(place for place in places if not self.wants(place))
            # 3. Blocks beyond the next leave an eighth of the room free for a move of weights.
            if size:
                near = self._head <= self._block + 1
                room = self._room if near else self._room - self._room // 8
                self._make_room(size, room, places, counts, near=near)
                self._is_full = not first and self._bytes(self.all_wanted()) + size > room
                if self._is_full:
                    return
            # 4. Wanted now; of these shards none is a left-over of other weights any more.
            for window in new:
                self._wanted[window] = self._shards(window)
                self._uses.update(self._wanted[window])
            for place in places:
                self._kept.pop(place, None)
            self._head += 1

    def _make_room(self, size: int, room: int, needed: Collection[int], counts: Sequence[int], *, near: bool) -> None:
        """Make room in the plan of windows: free kept shards, those first that come last."""
        going = sorted((place for place in self._kept if place not in needed), key=self._distance(counts))
        while going and self._bytes(self.all_wanted()) + size > room:
            if not near and self._bytes(self._kept) <= room // 2:
                return
            del self._kept[going.pop()]

    def _distance(self, counts: Sequence[int]) -> Callable[[int], float]:
        """Distance in the plan of windows: samples until a kept shard is needed, as the weights are."""
        weights = self._of().stages[-1].weights
        total = sum(weights)

        def distance(place: int) -> float:
            domain = self._kept[place][0]
            rows = self._first_row(self._kept[place]) - counts[domain]
            return rows * total / weights[domain] if weights[domain] else math.inf

        return distance

    def _counts(self, sample: int) -> tuple[int, ...]:
        """Samples of each domain before this one in the plan of windows, exactly."""
        block, mixture = sample // BLOCK, self._of()
        before = mixture.picks(np.arange(block * BLOCK, sample)).domain
        counts = np.bincount(before, minlength=len(self._places)) + mixture.counts(block * BLOCK)
        return tuple(counts.tolist())

    def _windows(self, start: Sequence[int], end: Sequence[int]) -> list[Window]:
        """Planned windows of the samples between these counts, by the share of their domain's ones that comes before
        them."""
        found = []
        for domain, (first, stop) in enumerate(zip(start, end, strict=True)):
            for window in self._windows_between(domain, first, stop):
                found.append(((self._first_row(window) - first) / (stop - first), window))
        return [window for _, window in sorted(found)]

    def _windows_between(self, domain: int, first: int, stop: int) -> Iterator[Window]:
        at = first
        while at < stop:
            epoch, index = divmod(at, self._rows(domain))
            window = domain, epoch, self._order.epoch(self._of().seed, domain, epoch).window_of(index)
            yield window
            at = self._first_row(window, behind=True)

    def _is_behind(self, window: Window, counts: Sequence[int]) -> bool:
        return self._first_row(window, behind=True) <= counts[window[0]]

    def _first_row(self, window: Window, *, behind: bool = False) -> int:
        """The first row of a planned window: rows of the domain, over all epochs, before it, or before the one behind
        it."""
        domain, epoch, number = window
        starts = self._order.epoch(self._of().seed, domain, epoch).window_starts
        return epoch * self._rows(domain) + int(starts[number + behind])

    def _shards(self, window: Window) -> list[int]:
        domain, epoch, number = window
        places = self._order.window_shards(self._of().seed, domain, epoch, number)
        return [self._places[domain][place] for place in places.tolist()]

    def _rows(self, domain: int) -> int:
        return self._of().num_rows[self._of().domains[domain]]

    def _of(self) -> Mixture:
        assert self._mixture is not None, "of follow"
        return self._mixture

    def _bytes(self, places: Iterable[int]) -> int:
        return sum(self._sizes[place] for place in places)

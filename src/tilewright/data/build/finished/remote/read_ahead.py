"""Shards ahead of the samples that need them, fetched by a few threads in exactly the order of the mixture.

What is wanted is whole windows of shards: from the one that the next sample is in to as many windows further as the
cache has room for. A window is let go when the samples have passed it. A shard that cannot be read is set aside
(wrong checksum, missing), or its source is away (nothing can be read): its rows are then blank, which is counted, until
it has returned.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tilewright.core.errors import DataError
from tilewright.core.log import get_logger
from tilewright.core.units import format_bytes
from tilewright.data.batches.mix import BLOCK, Mixture
from tilewright.data.build.finished.remote.address import DamagedFileError, Remote, SourceAwayError
from tilewright.data.build.finished.remote.index import TokenShard
from tilewright.data.build.finished.remote.shard_cache import ShardCache
from tilewright.data.build.finished.remote.windows import WindowedOrder

log = get_logger(__name__)

_MOST_BLOCKS = 512  # that are looked at in one call
_AT_ONCE = 4  # shards that are read at once
Window = tuple[int, int, int]
"""Place of the domain, epoch, window."""


@dataclass(frozen=True)
class Unreadable:
    """A shard without content."""

    why: str
    away: bool
    """Its source is away: it may return."""


@dataclass
class ReadCounts:
    """What was read so far."""

    fetched_bytes: int = 0
    fetched: int = 0
    fetch_s: float = 0.0
    """Seconds in which threads fetched, of all of them."""
    wait_s: float = 0.0
    """Seconds in which rows waited for shards."""
    in_memory: int = 0
    """Shards that the cache had no room for."""


class ReadAhead:
    """The shards of a dataset, read as a mixture needs them.

    Args:
        shards: of the dataset, those of a domain behind each other.
        remotes: where each domain's shards are.
        cache: where they are kept.
        order: of rows.
        domains: in the mixture's order.
        return_s: seconds after which a source that is away is tried again.
    """

    def __init__(
        self,
        shards: Sequence[TokenShard],
        remotes: Mapping[str, Remote],
        cache: ShardCache,
        order: WindowedOrder,
        domains: Sequence[str],
        return_s: float,
    ) -> None:
        self.shards, self.remotes, self.cache, self.order, self.domains = shards, remotes, cache, order, tuple(domains)
        self.return_s = return_s
        self.counts = ReadCounts()
        self.set_aside: dict[int, str] = {}
        """Shards that cannot be used, and why."""
        self.places = [[i for i, shard in enumerate(shards) if shard.domain == name] for name in domains]
        """Of each domain's shards."""
        self._number = sum(map(len, self.places))
        self._away: dict[str, tuple[float, str]] = {}  # domain -> when it was last tried, why
        self._mixture: Mixture | None = None
        self._wanted: dict[Window, list[int]] = {}  # windows and their shards
        self._uses: Counter[int] = Counter()  # shards of wanted windows
        self._block = self._head = 0  # of the next sample, and behind the last one that was looked at
        self._futures: dict[int, Future[bytes | Path | Unreadable]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def away(self) -> dict[str, str]:
        """Domains whose source is away, and why."""
        with self._lock:
            return {name: why for name, (_, why) in self._away.items()}

    def suspect(self, domain: str, why: str) -> None:
        """Take a source for away until it answers: it was when the run began, or when its checkpoint was written."""
        with self._lock:
            self._away.setdefault(domain, (-math.inf, why))

    def check_room(self) -> None:
        """Raise where the cache has no room for a window of each domain.

        Raises:
            DataError: with the bytes that are needed.
        """
        need = 0
        for places in self.places:
            sizes = sorted((self.shards[place].size for place in places), reverse=True)
            need += sum(sizes[: self.order.window])
        if need > self.cache.limit:
            raise DataError(
                "Cache of shards is smaller than one window of each domain",
                got=f"data.streaming.cache_bytes = {format_bytes(self.cache.limit)}",
                need=f"{need:,} bytes or more: {self.order.window} shards of each of {len(self.domains)} domains; "
                "twice as much, and the next windows are read ahead",
                try_=f"data.streaming.cache_bytes = {2 * need}, or a smaller data.streaming.window",
                where="data.streaming.cache_bytes",
            )

    def follow(self, mixture: Mixture, sample: int) -> None:
        """The next sample is this one, of this mixture: let go what is behind it, and fetch what comes.

        Args:
            mixture: of samples.
            sample: the next one.
        """
        block, before = sample // BLOCK, list(self._uses)
        if mixture is not self._mixture or not self._block <= block <= self._head:
            self._wanted, self._mixture, self._head = {}, mixture, block  # other weights: other windows come first
            self._uses.clear()
        else:
            counts = mixture.counts(block * BLOCK)
            for one in [window for window in self._wanted if self._is_behind(window, counts)]:
                self._uses.subtract(self._wanted.pop(one))
            self._uses = +self._uses
        self._block = block
        coming = self._extend(block)
        for place in before:  # first: what comes needs the room
            if place not in self._uses:
                self._let_go(place)
        for place in coming:
            with self._lock:
                if place not in self._futures:
                    self._submit(place)
        self._try_again()

    def bytes_of(self, place: int) -> bytes | Path | Unreadable:
        """A shard's content, or where it is; waits until it is there.

        Raises:
            DataError: the sources of all domains are away.
        """
        began = time.perf_counter()
        while True:
            with self._lock:
                future = self._futures.get(place) or self._submit(place)
            found = future.result()
            gone = isinstance(found, Path) and not found.exists()
            back = isinstance(found, Unreadable) and found.away and self.shards[place].domain not in self.away
            if not gone and not back:
                break
            if gone:
                self.cache.release(self.shards[place].digest)
            with self._lock:  # the source has returned since, or the file was removed: read it again
                if self._futures.get(place) is future:
                    del self._futures[place]
        self.counts.wait_s += time.perf_counter() - began
        if isinstance(found, Unreadable) and found.away and len(self.away) == len(self.domains):
            raise DataError(
                "No shard can be read: the sources of all domains are away",
                got=found.why,
                need="one source that answers, " + ", ".join(sorted({r.address for r in self.remotes.values()})),
                try_="the same command again when it does: it continues from the newest checkpoint",
                where="data.source",
            )
        return found

    def close(self) -> None:
        """Stop the threads and let all shards go."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self._mixture = None, None
        self._futures.clear()
        self._wanted.clear()
        self._uses.clear()
        self.cache.close()

    def _extend(self, block: int) -> list[int]:
        """Want the windows of the next blocks, as far as there is room; those of the first block in any case. Their
        shards, in the order in which they are needed."""
        assert self._mixture is not None, "of follow"
        coming: list[int] = []
        for _ in range(_MOST_BLOCKS):
            if self._head > block and len(self._uses) == self._number:
                break
            new = [one for one in self._windows(self._head) if one not in self._wanted]
            places = {place: None for one in new for place in self._shards(one)}
            size = sum(self.shards[place].size for place in places if place not in self._uses)
            if self._head > block and size and self._used() + size > self.cache.limit:
                break
            for window in new:
                self._wanted[window] = self._shards(window)
                self._uses.update(self._wanted[window])
                coming += self._wanted[window]
            self._head += 1
        return coming

    def _windows(self, block: int) -> list[Window]:
        """Windows of a block's samples, by their first ones."""
        mixture = self._mixture
        assert mixture is not None, "of follow"
        counts = np.array([mixture.counts(block * BLOCK), mixture.counts((block + 1) * BLOCK)])
        found: set[Window] = set()
        for domain, (first, stop) in enumerate(counts.T.tolist()):
            found.update(self._windows_between(domain, first, stop))
        if all(window in self._wanted for window in found):
            return []
        picks = mixture.picks(np.arange(block * BLOCK, (block + 1) * BLOCK))
        first_use: dict[Window, None] = {}
        number = {domain: first for domain, first in enumerate(counts[0].tolist())}
        for domain in picks.domain.tolist():  # inside a domain rows follow each other
            rows = mixture.num_rows[self.domains[domain]]
            epoch, index = divmod(number[domain], rows)
            first_use[domain, epoch, self.order.epoch(mixture.seed, domain, epoch).window_of(index)] = None
            number[domain] += 1
        return list(first_use)

    def _windows_between(self, domain: int, first: int, stop: int) -> Iterator[Window]:
        assert self._mixture is not None, "of follow"
        rows = self._mixture.num_rows[self.domains[domain]]
        at = first
        while at < stop:
            epoch, index = divmod(at, rows)
            order = self.order.epoch(self._mixture.seed, domain, epoch)
            window = order.window_of(index)
            yield domain, epoch, window
            at = epoch * rows + int(order.window_starts[window + 1])

    def _is_behind(self, window: Window, counts: Sequence[int]) -> bool:
        assert self._mixture is not None, "of follow"
        domain, epoch, number = window
        starts = self.order.epoch(self._mixture.seed, domain, epoch).window_starts
        return epoch * self._mixture.num_rows[self.domains[domain]] + int(starts[number + 1]) <= counts[domain]

    def _shards(self, window: Window) -> list[int]:
        domain, epoch, number = window
        assert self._mixture is not None, "of follow"
        places = self.order.window_shards(self._mixture.seed, domain, epoch, number)
        return [self.places[domain][place] for place in places.tolist()]

    def _let_go(self, place: int) -> None:
        with self._lock:
            future = self._futures.pop(place, None)
        if future is None:
            self._release(place)
            return
        future.cancel()
        future.add_done_callback(lambda _: self._release(place))  # one that is being read is held only at its end

    def _release(self, place: int) -> None:
        digest = self.shards[place].digest  # of equal content in two domains there is one file
        shared = any(self.shards[other].digest == digest for other in list(self._uses))
        if self.shards[place].domain not in self.away and not shared:
            self.cache.release(digest)

    def _used(self) -> int:
        return sum(self.shards[place].size for place in self._uses)

    def _submit(self, place: int) -> "Future[bytes | Path | Unreadable]":
        self._futures[place] = self._threads().submit(self._read, place)
        return self._futures[place]

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tilewright-shards")
        return self._pool

    def _read(self, place: int) -> bytes | Path | Unreadable:
        shard = self.shards[place]
        if place in self.set_aside:
            return Unreadable(self.set_aside[place], away=False)
        with self.cache.fetching(shard.digest):
            if (path := self.cache.hold(shard.digest)) is not None:
                return path
            if shard.domain in self.away:
                return Unreadable(self.away[shard.domain], away=True)
            began = time.perf_counter()
            try:
                content = self.remotes[shard.domain].fetch(shard.file, shard.size, shard.digest)
            except DamagedFileError as error:
                with self._lock:
                    self.set_aside[place] = str(error)
                return Unreadable(str(error), away=False)
            except SourceAwayError as error:
                self._note_away(shard.domain, str(error))
                return Unreadable(str(error), away=True)
            with self._lock:
                self.counts.fetched_bytes += len(content)
                self.counts.fetched += 1
                self.counts.fetch_s += time.perf_counter() - began
            path = self.cache.put(shard.digest, content)
        if path is None:
            self.counts.in_memory += 1
        return path or content

    def _note_away(self, domain: str, why: str) -> None:
        """All that is left of the domain's shards is held from now on."""
        with self._lock:
            self._away[domain] = time.monotonic(), why
        for shard in self.shards:
            if shard.domain == domain:
                self.cache.hold(shard.digest)

    def _try_again(self) -> None:
        """Ask sources that are away, one read each, whether they have returned."""
        for name, (tried, why) in list(self._away.items()):
            if time.monotonic() - tried < self.return_s:
                continue
            with self._lock:
                self._away[name] = time.monotonic(), why
            sound = [place for place in self.places[self.domains.index(name)] if place not in self.set_aside]
            if sound:
                self._threads().submit(self._ask, name, sound[0])

    def _ask(self, domain: str, place: int) -> None:
        shard, places = self.shards[place], self.places[self.domains.index(domain)]
        try:
            self.remotes[domain].fetch(shard.file, shard.size, shard.digest, retries=0)
        except (DamagedFileError, SourceAwayError):
            return
        with self._lock:
            self._away.pop(domain, None)
        for other in places:
            if other not in self._uses:
                self.cache.release(self.shards[other].digest)

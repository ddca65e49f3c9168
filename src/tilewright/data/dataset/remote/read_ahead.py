"""Shards ahead of the samples that need them, fetched by a few threads in exactly the order of the mixture.

Which shards those are `window_plan` says; one is let go when the samples have passed it. A shard that cannot be read
is set aside (wrong checksum, missing), or its source is away (nothing can be read): its rows are then blank, which is
counted, until it has returned.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tilewright.core.errors import DataError
from tilewright.core.log import get_logger
from tilewright.core.units import format_bytes
from tilewright.data.batches.mixture_order import Mixture
from tilewright.data.dataset.remote.address import DamagedFileError, Remote, SourceAwayError
from tilewright.data.dataset.remote.shard_cache import ShardCache
from tilewright.data.dataset.remote.shard_index import TokenShard
from tilewright.data.dataset.remote.shard_windows import WindowedOrder
from tilewright.data.dataset.remote.window_plan import WindowPlan

log = get_logger(__name__)

_AT_ONCE = 4  # shards that are read at once


@dataclass(frozen=True)
class Unreadable:
    """A shard without content."""

    why: str
    away: bool
    """Its source is away: it may return."""


@dataclass
class ReadCounts:
    """Counts of what was read so far."""

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
        self._plan = WindowPlan([shard.size for shard in shards], self.places, order, cache.limit)
        self._away: dict[str, tuple[float, str]] = {}  # domain -> when it was last tried, why
        self._futures: dict[int, Future[bytes | Path | Unreadable]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def away(self) -> dict[str, str]:
        """Domains whose source is away from reading ahead, and why."""
        with self._lock:
            return {name: why for name, (_, why) in self._away.items()}

    def suspect(self, domain: str, why: str) -> None:
        """Suspect a source that is read ahead: take it for away until it answers: it was when the run began, or when
        its checkpoint was written."""
        with self._lock:
            self._away.setdefault(domain, (-math.inf, why))

    def check_room(self) -> None:
        """Check room to read ahead: raise where the cache has none for a window of each domain.

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
        """Follow samples when reading ahead: the next one is this, of this mixture: free what is behind it, and fetch
        what comes.

        Args:
            mixture: of samples.
            sample: the next one.
        """
        if self._plan.is_other(mixture, sample):
            self._cancel_waiting()
        coming = self._plan.follow(mixture, sample, set(self._futures))
        if coming is not None:
            for place in [one for one in list(self._futures) if not self._plan.wants(one)]:
                self._let_go(place)  # first: what comes needs the room
            for place in coming:
                with self._lock:
                    if place not in self._futures:
                        self._submit(place)
        self._try_again()

    def bytes_of(self, place: int) -> bytes | Path | Unreadable:
        """Bytes of a shard read ahead: its content, or where it is; waits until it is there.

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
        """Close reading ahead: stop the threads and free all shards."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._futures.clear()
        self._plan.clear()
        self.cache.close()

    def _cancel_waiting(self) -> None:
        """Cancel reads ahead that have not begun: others may come first now."""
        with self._lock:
            for place in [place for place, future in self._futures.items() if future.cancel()]:
                del self._futures[place]

    def _let_go(self, place: int) -> None:
        with self._lock:
            future = self._futures.pop(place, None)
        if future is None:
            return
        future.cancel()
        future.add_done_callback(lambda _: self._release(place))  # one that is being read is held only at its end

    def _release(self, place: int) -> None:
        digest = self.shards[place].digest  # of equal content in two domains there is one file
        shared = any(self.shards[other].digest == digest for other in self._plan.all_wanted())
        if self.shards[place].domain not in self.away and not shared:
            self.cache.release(digest)

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
            # Another process may have fetched it while this one waited for the lock.
            if (path := self.cache.hold(shard.digest)) is not None:
                return path
            if shard.domain in self.away:
                return Unreadable(self.away[shard.domain], away=True)
            began = time.perf_counter()
            try:
                content = self.remotes[shard.domain].fetch(shard.file, shard.size, shard.digest)
            # One damaged shard stays set aside; a source that does not answer may return.
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
        # Without room in the cache the bytes are handed over themselves.
        if path is None:
            self.counts.in_memory += 1
        return path or content

    def _note_away(self, domain: str, why: str) -> None:
        """Note a source as away when reading ahead: all that is left of the domain's shards is held from now on."""
        with self._lock:
            self._away[domain] = time.monotonic(), why
        for shard in self.shards:
            if shard.domain == domain:
                self.cache.hold(shard.digest)

    def _try_again(self) -> None:
        """Try sources that are away again before reading ahead, one read each, to see if they have returned."""
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
            if not self._plan.wants(other):
                self.cache.release(self.shards[other].digest)

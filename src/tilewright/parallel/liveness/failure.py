"""A rank that fails where nobody can be asked: in the middle of a step, where the others wait for it in a collective.

    failing rank   its record says how it ends (`Heartbeat`), before anything that could wait for another rank
    the others     `Blame` reads the records: whose fault it is that a connection broke, and with which words to end;
                   where none breaks (NCCL, a rank that hangs on its way out) the watching thread ends the process

A killed rank leaves a record without an end, and no process. What all ranks meet together (bad numbers, an agreed
decision) needs none of this: each of them says how it ends, and none waits for another.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tilewright.core.errors import HardwareError
from tilewright.parallel.liveness.heartbeat import BEAT_S, RankRecord, records
from tilewright.parallel.liveness.repeat import Repeat

GONE_S = 2.0
"""Without a beat for so long, a record whose process is not there is that of a killed one. A broken connection is proof
enough without."""
BLAME_S = 4.0
"""How long a rank with a broken connection looks for the one whose fault it is."""
FORCED_S = 10.0
"""Since a rank has failed, after which one that still waits for it is ended."""
LOOK_S = 0.1


class RankFailedError(HardwareError):
    """Another rank has failed or died, and this one cannot continue without it."""

    failed = 0
    """That rank."""


@dataclass(frozen=True)
class RankEnd:
    """The rank that the others cannot continue without.

    Args:
        record: its last one.
        how: it ended.
    """

    record: RankRecord
    how: str

    def error(self, world: int) -> RankFailedError:
        """What the other ranks end with.

        Args:
            world: number of ranks.
        """
        record = self.record
        error = RankFailedError(
            f"Rank {record.rank} of {world} has failed in {record.where}; the others end with it",
            got=f"{self.how} ({record.process})",
            need="all ranks: each step needs every one of them",
            try_=f"what rank {record.rank} says of it; the same command continues from the newest checkpoint,\n"
            "and with torchrun --max-restarts N it does so by itself",
        )
        error.failed = record.rank
        return error


class Blame:
    """Finds out which other rank has failed, from the records in the run folder.

    Args:
        folder: of the run.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._beats: dict[int, tuple[tuple[int, int], float]] = {}

    def look(self, now: float, gone_s: float = GONE_S) -> RankEnd | None:
        """The rank that failed by itself, as far as can be seen now; None where all are well, or this one failed too.

        Args:
            now: seconds of a clock that never goes back.
            gone_s: without a beat, after which a process that is not there was killed.
        """
        found = records(self._folder)
        if self._rank in found and found[self._rank].end:
            return None
        quiet = self._quiet(found, now)
        for rank in sorted(quiet):
            record = found[rank]
            if record.has_failed and not record.follows:
                return RankEnd(record, record.end)
            if not record.end and quiet[rank] >= gone_s and not _is_there(record):
                return RankEnd(record, "it ended without a word")
        return None

    def wait(self, error: BaseException) -> RankEnd | None:
        """The same for a rank whose connection broke: looked for until it shows, or for four seconds. Then a rank that
        has given no sign of life in them is taken for it.

        Args:
            error: of this rank.
        """
        began = now = time.monotonic()
        while now - began < BLAME_S:
            if (found := self.look(now, gone_s=0.0)) is not None:
                return found
            time.sleep(LOOK_S)
            now = time.monotonic()
        found = records(self._folder)
        quiet = self._quiet(found, now)
        silent = [rank for rank in sorted(quiet) if not found[rank].end and quiet[rank] >= BLAME_S]
        told = f"it gives no sign of life, and here: {str(error).partition(chr(10))[0]}"
        return RankEnd(found[silent[0]], told) if silent else None

    def _quiet(self, found: Mapping[int, RankRecord], now: float) -> dict[int, float]:
        """Seconds without a beat of the other ranks, as seen by this one."""
        quiet = {}
        for rank, record in found.items():
            if rank == self._rank:
                continue
            beat = record.pid, record.beats
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
            quiet[rank] = now - self._beats[rank][1]
        return quiet


@contextmanager
def ending_with_others(
    blame: Blame, end: Callable[[RankEnd], None], every_s: float = BEAT_S, forced_s: float = FORCED_S
) -> Iterator[None]:
    """Inside, a thread sees to it that this process ends where it still waits for a rank that failed ten seconds ago.

    Args:
        blame: of this rank; not used by anybody else.
        end: ends the process, from that thread.
        every_s: between two looks.
        forced_s: since a rank was seen to have failed.
    """
    since: float | None = None

    def look() -> None:
        nonlocal since
        now = time.monotonic()
        found = blame.look(now)
        since = None if found is None else now if since is None else since
        if found is not None and since is not None and now - since >= forced_s:
            end(found)

    with Repeat(look, every_s, "failures"):
        yield


def _is_there(record: RankRecord) -> bool:
    """Whether a rank's process runs; of other machines that is not known, and taken for granted."""
    if record.host != platform.node():
        return True
    try:
        return psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def speaks_for_others(rank: int, failed: int) -> bool:
    """Whether this rank tells the user, once for all, that they end since another one failed.

    Args:
        rank: of this process.
        failed: the one that did.
    """
    return rank == (0 if failed else 1)

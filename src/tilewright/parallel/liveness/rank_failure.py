"""A rank that fails where no other can be asked: in the middle of a step, where the others wait for it in a collective.

    failing rank   its record says how it ends (`Heartbeat`), before anything that could wait for another rank
    the others     `Blame` reads the records: whose fault it is that a connection broke, and with which words to end;
                   where none breaks (NCCL, a rank that hangs on its way out) the watching thread ends the process

A killed rank leaves a record without an end, and no process. One that hangs leaves one that stands still: while others
are further it is seen from there (`Stalls`); where they wait for it in the same phase, their collective times out on
them, and not on the one that never came. What all ranks meet together (bad numbers, an agreed decision) needs none of
this: each of them says how it ends, and none waits for another.
"""

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tilewright.core.errors import HardwareError
from tilewright.parallel.liveness.heartbeat import BEAT_S, ENDED, RankRecord, records
from tilewright.parallel.liveness.repeated_work import Repeat

GONE_S = 2.0
"""Without a beat for so long, a record whose process is not there is that of a killed one. A broken connection is proof
enough without."""
BLAME_S = 4.0
"""How long a rank with a broken connection looks for the one whose fault it is."""
FORCED_S = 10.0
"""Since a rank has failed, after which one that still waits for it is ended."""
LOOK_S = 0.1
_CONTINUES = """the same command continues from the newest checkpoint,
and with torchrun --max-restarts N it does so by itself"""


class RankFailedError(HardwareError):
    """A rank has failed, died or hangs, and the others cannot continue without it."""

    failed = 0
    """That rank."""


@dataclass(frozen=True)
class RankEnd:
    """A rank that failed, died or hangs, without which the others cannot continue.

    Args:
        record: its last one.
        how: it ended.
    """

    record: RankRecord
    how: str
    hangs: bool = False
    """It has not ended, and does not go on."""

    def error(self, world: int, *, resumes: bool = True) -> RankFailedError:
        """The failure of a rank as the error with which the other ranks end.

        Args:
            world: number of ranks.
            resumes: there are checkpoints to continue from.
        """
        record = self.record
        look = f"what rank {record.rank} says of it"
        if self.hangs:
            look = f"py-spy dump --pid {record.pid} there; parallel.timeout_minutes if it needs longer"
        error = RankFailedError(
            f"Rank {record.rank} of {world} {'hangs' if self.hangs else 'has failed'} in {record.where}; "
            "the others end with it",
            got=f"{self.how} ({record.process})",
            need="all ranks: each step needs every one of them",
            try_=f"{look}; {_CONTINUES if resumes else 'then the same command again'}",
        )
        error.failed = record.rank
        return error


_END = (1 << 62,)
_NOT_BEGUN = (-1,)


class Stalls:
    """Finds a rank that has stalled while others wait for it. Ranks do the same in the same order, so of two ranks the
    one at an earlier place is waited for, in a collective, now or soon.

    Args:
        world: number of ranks. One without a record has not come to its first phase.
        limit_s: how long a rank may stand at one place while another is further. What takes long (`RankRecord.long`)
            may take longer for as long as the process works.
    """

    def __init__(self, world: int, limit_s: float) -> None:
        self._world, self._limit_s = world, limit_s
        self._since: dict[int, tuple[tuple[int, ...], float]] = {}

    def look(self, found: Mapping[int, RankRecord], now: float) -> tuple[RankRecord, float] | None:
        """Return the rank that has stalled for too long, and for how many seconds; of several, the one that is furthest
        behind.

        Args:
            found: records by rank.
            now: seconds of a clock that never goes back.
        """
        ranks = [found.get(rank, _missing(rank)) for rank in range(self._world)]
        still = [self._still_s(record, now) for record in ranks]
        furthest = max(_place(record) for record in ranks)
        behind = [
            (_place(record), record.rank)
            for record, seconds in zip(ranks, still, strict=True)
            if seconds >= self._limit_s and not record.end and _place(record) < furthest
        ]
        if not behind:
            return None
        _, worst = min(behind)
        return ranks[worst], still[worst]

    def _still_s(self, record: RankRecord, now: float) -> float:
        progress = (record.pid, *record.progress)
        if record.rank not in self._since or self._since[record.rank][0] != progress:
            self._since[record.rank] = progress, now
        return now - self._since[record.rank][1]


def _place(record: RankRecord) -> tuple[int, ...]:
    """How far a rank has got before a failure; in one phase of the run, what its thread beside has done."""
    if record.end == ENDED:
        return _END
    return (*record.place, record.aside_moves) if record.pid else _NOT_BEGUN


def _missing(rank: int) -> RankRecord:
    return RankRecord(rank, "a machine that is not known", 0, phase="start, before its first sign of life")


class Blame:
    """Finds out which other rank has failed or hangs, from the records in the run folder.

    Args:
        folder: of the run.
        rank: of this process.
        stalls: says which rank does not go on; None: none is looked for.
    """

    def __init__(self, folder: Path, rank: int, stalls: Stalls | None = None) -> None:
        self._folder, self._stalls = folder, stalls
        self.rank = rank
        self._beats: dict[int, tuple[tuple[int, int], float]] = {}

    def look(self, now: float, gone_s: float = GONE_S) -> RankEnd | None:
        """Return the rank that failed or hangs, as far as can be seen now; None if all are well, or this rank has
        ended. It may be this rank, if the others have given it up.

        Args:
            now: seconds of a clock that never goes back.
            gone_s: without a beat, after which a process that is not there was killed.
        """
        found = records(self._folder)
        if self.rank in found and found[self.rank].end:
            return None
        quiet = self._quiet(found, now)
        for rank in sorted(quiet):
            record = found[rank]
            if record.has_failed and not record.follows:
                return RankEnd(record, record.end)
            if quiet[rank] >= gone_s and not record.end and not is_running(record):
                return RankEnd(record, "it exited without an error record")
        if any(found[rank].timed_out and found[rank].end for rank in quiet) and not found[self.rank].timed_out:
            return RankEnd(found[self.rank], "the others have waited for it as long as they may", hangs=True)
        stalled = self._stalls.look(found, now) if self._stalls is not None else None
        if stalled is None:
            return None
        record, seconds = stalled
        return RankEnd(record, f"it made no progress for {seconds:.0f} s, and others wait for it", hangs=True)

    def wait(self, error: BaseException) -> RankEnd | None:
        """Wait up to four seconds for the rank at fault, after a connection broke or a collective timed out. At the end
        it is a rank that has not timed out as the others have, or that gives no sign of life.

        Args:
            error: of this rank, which has said so in its record if it is a timeout.
        """
        began = now = time.monotonic()
        while now - began < BLAME_S:
            if (found := self.look(now, gone_s=0.0)) is not None:
                return found
            time.sleep(LOOK_S)
            now = time.monotonic()
        found = records(self._folder)
        told = str(error).partition("\n")[0]
        if any(record.timed_out for record in found.values()):
            late = [rank for rank, record in sorted(found.items()) if not (record.timed_out or record.end)]
            first = min(late or [self.rank], key=lambda rank: found[rank].place)
            ranks = "it has" if len(late) < 2 else f"ranks {', '.join(map(str, late))} have"
            return RankEnd(found[first], f"{ranks} not come where the others wait: {told}", hangs=True)
        quiet = self._quiet(found, now)
        silent = [rank for rank in sorted(quiet) if not found[rank].end and quiet[rank] >= BLAME_S]
        return RankEnd(found[silent[0]], f"it gives no sign of life, and here: {told}") if silent else None

    def _quiet(self, found: Mapping[int, RankRecord], now: float) -> dict[int, float]:
        """Seconds for which this rank has seen no heartbeat of the others, before a failure."""
        quiet = {}
        for rank, record in found.items():
            if rank == self.rank:
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
    """End with the others on a failure: inside, a thread sees to it that this process ends where it still waits for a
    rank that failed ten seconds ago.

    Args:
        blame: of this rank, and of this thread alone.
        end: ends the process, from that thread.
        every_s: between two looks.
        forced_s: since a rank was seen to have failed. Twice that where it is this one: the others say so first.
    """
    since: float | None = None

    def look() -> None:
        nonlocal since
        now = time.monotonic()
        found = blame.look(now)
        since = None if found is None else now if since is None else since
        if found is None or since is None:
            return
        if now - since >= forced_s * (2 if found.record.rank == blame.rank else 1):
            end(found)

    with Repeat(look, every_s, "failures"):
        yield


def is_timeout(error: BaseException) -> bool:
    """True if a collective failed by its timeout: it waited for as long as that of its group.

    Args:
        error: of gloo or NCCL, which have no class for it.
    """
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


def is_running(record: RankRecord) -> bool:
    """True if a rank is running, not failed: it has neither ended nor was killed; of other machines the latter is not
    known."""
    if record.end or record.host != platform.node():
        return not record.end
    try:
        return psutil.Process(record.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def speaks_for_others(rank: int, failed: int) -> bool:
    """True if this rank speaks of the failure for others: tells the user, once for all, that they end since another one
    failed.

    Args:
        rank: of this process.
        failed: the one that did.
    """
    return rank == (0 if failed else 1)

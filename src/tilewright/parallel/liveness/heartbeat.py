"""Signs of life of a run's ranks, in one small file per rank of the run folder: step, phase, and a count that goes on.

    beat = Heartbeat(folder, rank=1)      # a thread counts, once a second, for as long as this process can run
    beat.at(12, "forward")                # where it is, readable at once, and after a kill -9 too
    beat.waits()                          # its part is done: from here on it waits for the others
    for line in Watch(folder, 4, 0).look(now): ...   # who is silent, or the straggler

Files, because they outlive the process and its store, and ranks of several machines share the run folder anyhow. A
record is mapped into memory: writing one costs microseconds. Clocks of machines are never compared: a reader counts the
seconds in which a record has not changed.
"""

import contextlib
import json
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright.parallel.liveness.repeated_work import Repeat, WorkMeter

FOLDER = "ranks"
ENDED = "ended"
"""How a rank's record ends that came to its end."""
_SIZE = 1024
BEAT_S = 1.0
SILENT_S = 10.0
"""Without a beat for so long, a process is stopped, dead or cut off."""
LAG_S = 20.0
"""In one phase for so long while another rank is further, a rank is the straggler."""


@dataclass(frozen=True)
class RankRecord:
    """The record that a rank writes of itself."""

    rank: int
    host: str
    pid: int
    lap: int = 0
    """Starts: a run may go back to an earlier step."""
    step: int = 0
    """The one it works on, counted from 1; 0 before the first."""
    phase: str = "start"
    moves: int = 0
    """Phases since the step began: ranks do the same, so of two in one step the one with fewer is behind."""
    waiting: bool = False
    """For others, its own part of the phase done."""
    passes: int = 0
    """Passes of a pipeline in this step, from 1 on; 0 outside of them. Ranks run them in different orders, so their
    number says nothing of who is behind: who is in a pass is, while others wait between two of theirs."""
    aside: str = ""
    """What a thread of it does beside the steps."""
    aside_moves: int = 0
    """Phases of that, since the run began."""
    long: bool = False
    """What it does now may take long, and is not over while the process works."""
    worked: int = 0
    """Beats at which it had used processor or disk since the one before; counted while `long`."""
    timed_out: bool = False
    """It waited for others as long as it may, in vain."""
    beats: int = 0
    end: str = ""
    """How the process ended; empty while it runs, and for ever where it was killed."""
    follows: bool = False
    """It ended because another rank had."""

    @property
    def where(self) -> str:
        """The step and phase of the rank by its heartbeat in words, for a user."""
        doing = f"{self.phase}, waiting" if self.waiting else self.phase
        return f"step {self.step}, {doing}" if self.step else doing

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """How far the rank has got in the run, by its heartbeat."""
        return self.lap, self.step, self.moves, self.waiting and self.passes > 0

    @property
    def progress(self) -> tuple[int, ...]:
        """The numbers of a heartbeat that stop changing when the rank does nothing more."""
        return (*self.place, self.passes, self.aside_moves, self.worked)

    @property
    def has_failed(self) -> bool:
        """True if the rank's heartbeat says that it ends on an error."""
        return self.end not in ("", ENDED)

    @property
    def process(self) -> str:
        """The process of the rank in its heartbeat, in words, for a user."""
        return f"process {self.pid} on {self.host}"


class Heartbeat:
    """Writes this rank's signs of life. A context manager around the run: what ends the run is recorded.

    Args:
        folder: of the run.
        rank: of this process.
        beat_s: between two beats.
    """

    def __init__(self, folder: Path, rank: int, beat_s: float = BEAT_S) -> None:
        self._record = RankRecord(rank, platform.node(), os.getpid(), long=True)
        self._lock = threading.Lock()
        self._work, self._in_passes = WorkMeter(), False
        path = folder / FOLDER / f"{rank:05d}.json"
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # another process's, which a reader may have open
        path.write_bytes(b" " * _SIZE)  # a full disk shows here, not in the mapping
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._set()
        self._thread = Repeat(self._beat, beat_s, "heartbeat")

    def at(self, step: int, phase: str, *, long: bool = False) -> None:
        """Heartbeat at the begin of a phase of a step (counted from 1).

        Args:
            step: see above.
            phase: its name, for a user.
            long: how long it takes is not known.
        """
        with self._lock:
            moves = self._record.moves + 1 if step == self._record.step else 0
            self._set(step=step, phase=phase, moves=moves, passes=0, waiting=False, long=long)

    def begin(self, phase: str) -> None:
        """Record in the heartbeat that a phase of the start begins, which is later than all steps before."""
        with self._lock:
            self._set(lap=self._record.lap + 1, step=0, moves=0, phase=phase, waiting=False, long=True)

    def phase(self, phase: str) -> None:
        """Heartbeat at a phase of the step that this rank is in. Where passes of a pipeline are its phases, nothing."""
        if self._in_passes:
            return
        self.at(self._record.step, phase, long=self._record.long)

    @contextlib.contextmanager
    def passing(self) -> Iterator[Callable[[str], contextlib.AbstractContextManager[None]]]:
        """Record the passes of a pipeline in the heartbeat, each rank's in its own order; between two passes a rank
        waits for others. Yields a function that is called with a pass's name, and is open while the pass runs."""
        with self._lock:
            self._in_passes = True
            self._set(moves=self._record.moves + 1, passes=1, waiting=True)
        try:
            yield self._pass
            with self._lock:
                self._set(moves=self._record.moves + 1, passes=0, waiting=False)
        finally:
            self._in_passes = False

    @contextlib.contextmanager
    def _pass(self, name: str) -> Iterator[None]:
        with self._lock:
            self._set(phase=name, passes=self._record.passes + 1, waiting=False)
        yield
        with self._lock:
            self._set(waiting=True)

    def waits(self) -> None:
        """Record in the heartbeat that this rank has done its part of the phase and waits. A rank that does not come
        here becomes the straggler."""
        with self._lock:
            self._set(moves=self._record.moves + 1, waiting=True)

    def works(self) -> None:
        """Record in the heartbeat that this rank has waited, and continues with the phase."""
        with self._lock:
            self._set(waiting=False)

    def aside(self, phase: str) -> None:
        """Heartbeat of a thread that begins a phase of what it does beside the steps."""
        with self._lock:
            self._set(aside=phase, aside_moves=self._record.aside_moves + 1)

    def give_up(self) -> None:
        """Record in the heartbeat that this rank gives up, after it has waited for others as long as it may."""
        with self._lock:
            self._set(timed_out=True)

    def fail(self, error: BaseException, *, follows: bool = False) -> None:
        """Record in the heartbeat that this rank ends on an error, for those who wait for it. The first error stays.

        Args:
            error: a user's, or a bug.
            follows: another rank had ended before.
        """
        with self._lock:
            if not self._record.end:
                self._set(end=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", follows=follows)
            self._map.flush()

    def close(self) -> None:
        """Close a heartbeat: this rank ended; stop counting."""
        self._thread.stop()
        with self._lock:
            self._set(end=self._record.end or ENDED)
            self._map.flush()
            self._map.close()

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def _beat(self) -> None:
        worked = self._record.long and self._work.has_worked()
        with self._lock:
            self._set(beats=self._record.beats + 1, worked=self._record.worked + worked)
            self._map.flush()  # to a disk that other machines see

    def _set(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        text = json.dumps(asdict(self._record)).encode()
        if len(text) > _SIZE:
            text = json.dumps(asdict(self._record) | {"end": self._record.end[:100], "host": ""}).encode()
        self._map[:] = text[:_SIZE].ljust(_SIZE)


def records(folder: Path) -> dict[int, RankRecord]:
    """Read the heartbeats of a run folder by rank. One that is being written is left out; None if another rank removes
    the folder meanwhile."""
    found = {}
    try:
        paths = sorted((folder / FOLDER).glob("*.json"))
    except FileNotFoundError:
        return found
    for path in paths:
        with contextlib.suppress(ValueError, TypeError, OSError):
            record = RankRecord(**json.loads(path.read_text()))
            found[record.rank] = record
    return found


def take_lost(folder: Path) -> tuple[RankRecord, ...]:
    """Take lost ranks by their heartbeats: those of the run before this one that exited without an error record:
    killed, or with their machine. All records are removed."""
    lost = tuple(record for record in records(folder).values() if not record.end)
    for path in (folder / FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)
    return lost


@dataclass
class _Seen:
    record: RankRecord
    beat_at: float
    moved_at: float
    told: str = ""


class Watch:
    """Watches the signs of life of the other ranks.

    Args:
        folder: of the run.
        world: number of ranks.
        rank: that watches. It speaks only where all ranks before it are silent.
        silent_s: without a beat, after which a rank is named.
        lag_s: in one phase while others are further, after which a rank is named.
    """

    def __init__(self, folder: Path, world: int, rank: int, silent_s: float = SILENT_S, lag_s: float = LAG_S) -> None:
        self._folder, self._world, self._rank = folder, world, rank
        self._silent_s, self._lag_s = silent_s, lag_s
        self._seen: dict[int, _Seen] = {}

    def look(self, now: float) -> list[str]:
        """Watch heartbeats: news of other ranks: one that is silent, is the straggler, or has resumed.

        Args:
            now: seconds of a clock that never goes back.
        """
        for rank, record in records(self._folder).items():
            self._note(rank, record, now)
        silent = {rank for rank, seen in self._seen.items() if self._is_silent(seen, now)}
        lines = [*self._silence(silent, now), *self._lag(silent, now)]
        return lines if all(rank in silent for rank in range(self._rank)) else []

    def _note(self, rank: int, record: RankRecord, now: float) -> None:
        seen = self._seen.get(rank)
        if seen is None or seen.record.pid != record.pid:
            self._seen[rank] = _Seen(record, now, now)
            return
        if record.beats != seen.record.beats:
            seen.beat_at = now
        if record.progress != seen.record.progress:
            seen.moved_at = seen.beat_at = now
        seen.record = record

    def _is_silent(self, seen: _Seen, now: float) -> bool:
        return not seen.record.end and now - seen.beat_at >= self._silent_s

    def _silence(self, silent: set[int], now: float) -> Iterator[str]:
        for rank, seen in sorted(self._seen.items()):
            if rank in silent and seen.told != "silent":
                seen.told = "silent"
                quiet = f"has given no sign of life for {now - seen.beat_at:.0f} s"
                yield f"rank {rank} {quiet}, last seen in {seen.record.where} ({seen.record.process})"
            elif rank not in silent and seen.told == "silent":
                seen.told = ""
                yield f"rank {rank} resumed, in {seen.record.where}"

    def _lag(self, silent: set[int], now: float) -> Iterator[str]:
        running = {rank: seen for rank, seen in self._seen.items() if rank not in silent and not seen.record.end}
        if silent or len(running) < 2:
            return
        place = {rank: seen.record.place for rank, seen in running.items()}
        last, first = min(place.values()), max(place.values())
        ahead = next(seen.record.where for rank, seen in running.items() if place[rank] == first)
        for rank, seen in sorted(running.items()):
            behind = place[rank] == last < first and now - seen.moved_at >= self._lag_s
            if behind and seen.told != "behind":
                seen.told = "behind"
                held = f"is the straggler: {now - seen.moved_at:.0f} s in {seen.record.where}"
                yield f"rank {rank} {held}, others are in {ahead} ({seen.record.process})"
            elif not behind and seen.told == "behind":
                seen.told = ""
                yield f"rank {rank} resumed, in {seen.record.where}"


@contextlib.contextmanager
def watching(watch: Watch, tell: Callable[[str], None], every_s: float = BEAT_S) -> Iterator[None]:
    """Watch the ranks' heartbeats in a thread, and report news.

    Args:
        watch: of this rank.
        tell: called in that thread.
        every_s: between two looks.
    """

    def look() -> None:
        for line in watch.look(time.monotonic()):
            tell(line)

    with Repeat(look, every_s, "watch"):
        yield

"""Who runs the units of a stage: processes of this machine, or ranks that torchrun or a Slurm array started.

Both run the same function on the same units, and units publish themselves whole, so the dataset is the same, byte for
byte. Ranks need nothing of each other but the folder: each takes every world-th unit and waits for the others' files.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tilewright.core import env
from tilewright.core.errors import HardwareError
from tilewright.core.log import get_logger
from tilewright.data.build.config import DataBuild
from tilewright.data.build.context import Context
from tilewright.data.build.plan import BuildStage, stage_named

log = get_logger(__name__)

_POLL_S, _SAY_S = 0.1, 60.0

Done = Callable[[int], None]
"""Told how many units have been finished."""


class UnitExecutor(Protocol):
    """Runs units of one stage after the other."""

    is_first: bool
    """Whether this process also publishes the dataset; one of a build does."""
    mark: str
    """In the names of what this process has not finished; "*": nobody else's is there."""

    def run(self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done) -> None:
        """Return when all units `todo`, as (index, fingerprint), are finished."""
        ...


class LocalExecutor:
    """Processes of this machine; 1: this process alone. A context manager."""

    is_first, mark = True, "*"

    def __init__(self, processes: int):
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def run(self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done) -> None:
        """See `UnitExecutor`.

        Raises:
            HardwareError: a process was killed while it made a unit alone.
        """
        if self._processes == 1 or len(todo) == 1:
            for index, fingerprint in todo:
                context.units.make(stage.name, index, fingerprint, lambda f, i=index: stage.run(context, i, f))
                advance(1)
            return
        try:
            self._submit(context, stage, todo, advance, self._processes)
        except BrokenProcessPool:
            self._close()
            self._one_by_one(context, stage, todo, advance)

    def _one_by_one(self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done) -> None:
        """After a process was killed: each unit that is left alone, so that it has the memory of all."""
        log.warning("a process that was %s was killed; the units left run one at a time", stage.says)
        for unit in todo:
            if context.units.is_done(stage.name, *unit):
                continue
            try:
                self._submit(context, stage, [unit], advance, 1)
            except BrokenProcessPool as error:
                raise HardwareError(
                    "Process of a data build was killed, and again when it ran alone",
                    got=f"unit {unit[0]} of the stage {stage.name}: {_content(context, unit[0])}",
                    need="enough memory for it: Linux kills processes when there is none left",
                    try_="a smaller read.shard_bytes, or without this file; finished units stay",
                    where=str(context.folder(stage.name, unit[0])),
                ) from error
            finally:
                self._close()

    def _submit(
        self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done, processes: int
    ) -> None:
        setting = context.build.model_dump_json()
        with env.one_thread():  # around submitting, too: that is when processes start
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(processes, spawn, initializer=_watch_parent, initargs=(os.getpid(),))
            place = setting, str(context.out), stage.name
            jobs = [self._pool.submit(make_unit, *place, *unit) for unit in todo]
        for job in as_completed(jobs):
            job.result()
            advance(1)
        for index, _ in todo:
            context.units.forget(stage.name, index)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._close()


class RankExecutor:
    """One of several processes that somebody else started.

    Args:
        rank, world: this process and how many there are.
    """

    def __init__(self, rank: int, world: int):
        self._rank, self._world, self.is_first, self.mark = rank, world, rank == 0, f"rank{rank}"

    def run(self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done) -> None:
        """See `UnitExecutor`."""
        context.units.mark = self.mark
        mine = [unit for unit in todo if unit[0] % self._world == self._rank]
        for index, fingerprint in mine:
            context.units.make(stage.name, index, fingerprint, lambda f, i=index: stage.run(context, i, f))
            advance(1)
        others = [unit for unit in todo if unit[0] % self._world != self._rank]
        said = time.monotonic()
        while others:
            for unit in others:
                context.units.forget(stage.name, unit[0])
            left = [unit for unit in others if not context.units.is_done(stage.name, *unit)]
            advance(len(others) - len(left))
            others = left
            if others and time.monotonic() - said > _SAY_S:
                said = time.monotonic()
                ranks = ", ".join(sorted({str(index % self._world) for index, _ in others}))
                log.warning("rank %d waits for ranks %s, which are %s", self._rank, ranks, stage.says)
            time.sleep(_POLL_S if others else 0)

    def __enter__(self) -> "RankExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def make_unit(setting: str, out: str, stage: str, index: int, fingerprint: str) -> None:
    """In a worker: make one unit of the build with settings `setting` (JSON) in the folder `out`."""
    context = _context(setting, out)
    if stage == "read":
        context.listing.shards  # noqa: B018  listed once per worker, outside of the unit's time
    found = stage_named(stage)
    context.units.make(stage, index, fingerprint, lambda folder: found.run(context, index, folder))


@lru_cache(maxsize=1)
def _context(setting: str, out: str) -> Context:
    return Context(DataBuild.model_validate_json(setting), Path(out))


def _watch_parent(parent: int) -> None:
    """End this worker when its parent is gone: a pool's workers wait for work for ever otherwise."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _content(context: Context, shard: int) -> str:
    """A few files of a shard."""
    if shard >= context.num_shards:
        return "a range of hashes"
    names = [item.name for item in context.listing.shards[shard]]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")

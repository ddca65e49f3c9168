"""Who runs the units of a stage: processes of this machine, or ranks that torchrun or a Slurm array started.

Both run the same function on the same units, and units publish themselves whole, so the dataset is the same, byte for
byte. Ranks need nothing of each other but the folder: each takes every world-th unit and waits for the others' files.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tilewright.core import env
from tilewright.core.errors import HardwareError
from tilewright.core.log import get_logger
from tilewright.data.build.config import DataBuild
from tilewright.data.build.context import BuildStage, Context
from tilewright.data.build.inputs import Item
from tilewright.data.build.plan import stage_named
from tilewright.data.build.stages.read import STAGE as READ
from tilewright.data.build.stages.read import read_item, read_shard

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
    """Processes of this machine; 1: this process alone. A context manager.

    A unit whose process was killed is tried alone; if it is killed again, the files that do it are set aside.
    """

    is_first, mark = True, "*"

    def __init__(self, processes: int):
        self._processes = processes
        self._pool: ProcessPoolExecutor | None = None

    def run(self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done) -> None:
        """See `UnitExecutor`.

        Raises:
            HardwareError: a process was killed while it made a unit alone, of a later stage than the first.
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
            context.units.forget(stage.name, unit[0])
            if context.units.is_done(stage.name, *unit):
                continue
            try:
                self._submit(context, stage, [unit], advance, 1)
            except BrokenProcessPool as error:
                self._close()
                if stage.name != READ:
                    raise _killed(context, stage, unit[0]) from error
                self._set_aside(context, unit)
                advance(1)
            finally:
                self._close()

    def _set_aside(self, context: Context, unit: tuple[int, str]) -> None:
        """Make a unit of the first stage without the files that kill the process that reads them."""
        items = context.listing.shards[unit[0]]
        setting, bad = context.build.model_dump_json(), []
        for item in items:
            try:
                with env.one_thread(), self._processes_of(1) as alone:
                    alone.submit(try_item, setting, item).result()
            except BrokenProcessPool:
                log.warning("%s is set aside: the process that read it was killed", item.name)
                bad.append(item)
        good = [item for item in items if item not in bad]
        context.units.make(READ, *unit, lambda folder: read_shard(good, context.build, folder, killed=bad))

    def _submit(
        self, context: Context, stage: BuildStage, todo: Sequence[tuple[int, str]], advance: Done, processes: int
    ) -> None:
        setting = context.build.model_dump_json()
        with env.one_thread():  # around submitting, too: that is when processes start
            self._pool = self._pool or self._processes_of(processes)
            place = setting, str(context.out), context.num_shards, stage.name
            shards = context.listing.shards if stage.name == READ else None
            given = [None if shards is None else shards[index] for index, _ in todo]
            jobs = [self._pool.submit(make_unit, *place, *unit, items) for unit, items in zip(todo, given, strict=True)]
        for job in as_completed(jobs):
            job.result()
            advance(1)
        for index, _ in todo:
            context.units.forget(stage.name, index)

    def _processes_of(self, num: int) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(num, spawn, initializer=_watch_parent, initargs=(os.getpid(),))

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._close()


class RankExecutor:
    """One of several processes that something else started, such as torchrun.

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


def make_unit(
    setting: str, out: str, num_shards: int, stage: str, index: int, fingerprint: str, items: list[Item] | None
) -> None:
    """In a worker: make one unit of the build with settings `setting` (JSON) in the folder `out`. `items` are what a
    unit of the first stage reads."""
    context = _context(setting, out, num_shards)

    def work(folder: Path) -> Mapping[str, Any]:
        return (
            stage_named(stage).run(context, index, folder)
            if items is None
            else read_shard(items, context.build, folder)
        )

    context.units.make(stage, index, fingerprint, work)


@lru_cache(maxsize=1)
def _context(setting: str, out: str, num_shards: int) -> Context:
    return Context(DataBuild.model_validate_json(setting), Path(out), num_shards=num_shards)


def _watch_parent(parent: int) -> None:
    """End this worker when its parent is gone: a pool's workers wait for work for ever otherwise. An interrupt is the
    parent's, which lets the units that run come to their end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def try_item(setting: str, item: Item) -> None:
    """In a worker: read one item, and keep nothing of it."""
    for _ in read_item(item, DataBuild.model_validate_json(setting)):
        pass


def _killed(context: Context, stage: BuildStage, index: int) -> HardwareError:
    return HardwareError(
        "Process of a data build was killed, and again when it ran alone",
        got=f"unit {index} of the stage {stage.name}",
        need="enough memory for it: Linux kills processes when there is none left",
        try_="a smaller read.shard_bytes; units of earlier stages that do not change stay",
        where=str(context.folder(stage.name, index)),
    )

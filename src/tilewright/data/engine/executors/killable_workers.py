"""Units in worker processes that may be killed, for memory above all, and what becomes of the units of those.

A unit whose process was killed is tried alone, after all others. If it is killed again, the files that do it are found
one by one and set aside where the unit reads files of the user; any other unit is an error.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, Future, as_completed
from types import TracebackType
from typing import Self

from tilewright.core import env
from tilewright.core.errors import HardwareError
from tilewright.core.log import get_logger
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import Item
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import declared_settings
from tilewright.data.engine.executors.build_executor import Done, Unit
from tilewright.data.engine.executors.workers import make_unit, try_item

log = get_logger(__name__)


class PooledExecutor(ABC):
    """Runs units of a data build in a pool of worker processes that may be killed. A context manager.

    Args:
        prefix: in the names of what its processes have not finished; "" where no others are there.
    """

    is_first = True

    def __init__(self, prefix: str = "") -> None:
        self._pool: Executor | None = None
        self._prefix, self.mark = prefix, f"{prefix}*"

    @property
    @abstractmethod
    def killed(self) -> tuple[type[BaseException], ...]:
        """Errors of a job whose worker was killed."""

    @abstractmethod
    def pool_of(self, num: int | None) -> Executor:
        """A pool of `num` killable workers; None: of all there are."""

    def run(self, context: Context, stage: BuildStage, todo: Sequence[Unit], advance: Done) -> None:
        """Run the units of a stage in killable workers: see `UnitExecutor`.

        Raises:
            HardwareError: a process was killed while it made a unit alone, and by no file of the user.
        """
        lost = self._submit(context, stage, todo, advance, None)
        if lost:
            self.close()
            log.warning("a process that was %s was killed; %d units run again, one at a time", stage.says, len(lost))
        for unit in lost:
            self._alone(context, stage, unit, advance)
        if lost:
            self.close()
            context.units.clean(self.mark)

    def _alone(self, context: Context, stage: BuildStage, unit: Unit, advance: Done) -> None:
        """After a worker was killed: a unit alone, that has the memory of all."""
        context.units.forget(stage.name, unit[0])
        if context.units.is_done(stage.name, *unit):
            advance(1)
            return
        if not self._submit(context, stage, [unit], advance, 1):
            return
        self.close()
        files = stage.files(context, unit[0])
        bad = self._killers(context, stage, files)
        if bad and bad == files:
            self._can_start()
        context.set_aside(bad)
        if not files or self._submit(context, stage, [unit], advance, 1):
            raise _killed(context, stage, unit[0])

    def _killers(self, context: Context, stage: BuildStage, items: Sequence[Item]) -> list[Item]:
        """Killers of workers: those of some files that kill the process which reads them: two in a row, the second of
        which read nothing else."""
        bad: list[Item] = []
        left = list(items)
        while left:
            item = self._first_killer(context, stage, left)
            if item is None:
                break
            del left[: left.index(item) + 1]
            if self._first_killer(context, stage, [item]) is not None:
                log.warning("%s is set aside: the process that read it was killed", item.name)
                bad.append(item)
        return bad

    def _first_killer(self, context: Context, stage: BuildStage, items: Sequence[Item]) -> Item | None:
        """The first killer of some files, at which a worker that reads one after the other is killed."""
        settings = declared_settings(context.build, stage.settings)
        with env.one_thread(), self.pool_of(1) as alone:
            for item in items:
                try:
                    alone.submit(try_item, settings, item).result()
                except self.killed:
                    return item
        return None

    def _can_start(self) -> None:
        """Check that a worker that reads nothing is not killed: one that is was not killed by a file.

        Raises:
            HardwareError: it is killed, too.
        """
        try:
            with env.one_thread(), self.pool_of(1) as alone:
                alone.submit(os.getpid).result()
        except self.killed as error:
            raise HardwareError(
                "Worker processes of a data build cannot start",
                got="each is killed before it reads anything",
                need="memory for one process, and a main module that starts nothing when it is imported",
                try_="free some memory, and the same command again: finished units stay",
            ) from error

    def _submit(
        self, context: Context, stage: BuildStage, todo: Sequence[Unit], advance: Done, num: int | None
    ) -> list[Unit]:
        """Submit units to a pool of `num` killable workers; returns those whose process was killed."""
        root = str(context.units.root.absolute())
        jobs: dict[Future, Unit] = {}
        lost: list[Unit] = []
        with env.one_thread():  # around submitting, too: that is when processes start
            self._pool = self._pool or self.pool_of(num)
            for unit in todo:
                work = stage.work(context, unit[0])
                try:
                    jobs[self._pool.submit(make_unit, root, stage.name, *unit, work, self._prefix)] = unit
                except self.killed:  # the pool knows already
                    lost.append(unit)
        for job in as_completed(jobs):
            try:
                job.result()
            except self.killed:
                lost.append(jobs[job])
                continue
            context.units.forget(stage.name, jobs[job][0])
            advance(1)
        return sorted(lost)

    def close(self) -> None:
        """Close the pool of killable workers, if there is one, without the jobs that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def _killed(context: Context, stage: BuildStage, index: int) -> HardwareError:
    return HardwareError(
        "Process of a data build was killed, and again when it ran alone",
        got=f"unit {index} of the stage {stage.name}",
        need="enough memory for it: Linux kills processes when there is none left",
        try_="a smaller read.shard_bytes; units of earlier stages that do not change stay",
        where=str(context.folder(stage.name, index)),
    )

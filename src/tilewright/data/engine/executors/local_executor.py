"""The executor of a build on processes of this machine."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tilewright.core.subprocess_call import end_with_parent
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.executors.build_executor import Done, Unit
from tilewright.data.engine.executors.killable_workers import PooledExecutor


class LocalExecutor(PooledExecutor):
    """Executor of a data build in processes of this machine; 1: this process alone. A context manager.

    Args:
        processes: at a time.
        apart: files are read by another process than this one in any case, so that one that kills its reader is set
            aside. It takes a second to start.
        prefix: see `PooledExecutor`.
    """

    @property
    def killed(self) -> tuple[type[BaseException], ...]:
        """Errors that say that a local process was killed: see `PooledExecutor`."""
        return (BrokenProcessPool,)

    def __init__(self, processes: int, *, apart: bool = False, prefix: str = ""):
        super().__init__(prefix)
        self._processes, self._apart = processes, apart

    def run(self, context: Context, stage: BuildStage, todo: Sequence[Unit], advance: Done) -> None:
        """Run the units of a stage in local processes: see `UnitExecutor`.

        Raises:
            HardwareError: a process was killed while it made a unit alone, and by no file of the user.
        """
        reads = self._apart and any(stage.files(context, index) for index, _ in todo)
        if reads or (self._processes > 1 and len(todo) > 1):
            super().run(context, stage, todo, advance)
            if self._processes == 1:
                self.close()
            return
        for index, fingerprint in todo:
            context.units.make(stage.name, index, fingerprint, stage.work(context, index))
            advance(1)

    def pool_of(self, num: int | None) -> Executor:
        """A pool of local processes: see `PooledExecutor`."""
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(num or self._processes, spawn, initializer=_end_with_parent, initargs=(os.getpid(),))


def _end_with_parent(parent: int) -> None:
    """Let this local process end with its parent: a pool's workers wait for work for ever otherwise. An interrupt is
    the parent's, which lets the units that run come to their end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)

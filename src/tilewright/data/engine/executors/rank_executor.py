"""The executor of a build on ranks of torchrun or Slurm: each takes every world-th unit, and waits for others' files.

Ranks need nothing of each other but the folder. Files are read by a process of each rank, which may be killed.
"""

import os
import time
from collections.abc import Sequence

from tilewright.core.log import get_logger
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.executors.build_executor import Done, Unit
from tilewright.data.engine.executors.local_executor import LocalExecutor

log = get_logger(__name__)

_POLL_S, _SAY_S = 0.1, 60.0


class RankExecutor:
    """One of several processes that something else started, such as torchrun.

    Args:
        rank, world: this process and how many there are.
    """

    def __init__(self, rank: int, world: int):
        self._rank, self._world, self.is_first = rank, world, rank == 0
        self._readers = LocalExecutor(1, apart=True, prefix=f"rank{rank}-")
        self.mark = self._readers.mark

    def run(self, context: Context, stage: BuildStage, todo: Sequence[Unit], advance: Done) -> None:
        """Run a rank's units of a stage: see `UnitExecutor`."""
        context.units.mark = self.mark.replace("*", str(os.getpid()))
        self._readers.run(context, stage, [unit for unit in todo if unit[0] % self._world == self._rank], advance)
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
        self._readers.close()

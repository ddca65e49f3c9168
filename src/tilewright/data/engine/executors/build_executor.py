"""The executor of a build: it runs the units of a stage, wherever it has processes.

All run the same function on the same units, and units publish themselves whole, so the dataset is the same, byte for
byte: from processes of this machine (`local_executor`), ranks that torchrun or Slurm started (`rank_executor`), tasks
of Ray (`ray_executor`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage

Unit = tuple[int, str]
"""Index and fingerprint."""
Done = Callable[[int], None]
"""Told how many units have been finished."""


class UnitExecutor(Protocol):
    """Executor of a data build: runs the units of one stage after the other."""

    is_first: bool
    """Whether this process also publishes the dataset; one of a build does."""
    mark: str
    """In the names of what this process has not finished; "*": no other process works there."""

    def run(self, context: Context, stage: BuildStage, todo: Sequence[Unit], advance: Done) -> None:
        """An executor of a build runs the units `todo` of a stage; it returns when all are finished."""
        ...

"""Agreements of a run's ranks while it runs; a process alone agrees with itself, and asks no other.

What one rank alone sees (a signal, minutes that have passed, rows of another length, memory that runs short, a folder
that is gone) is brought to all before any of them acts on it: the next collective would wait for ever otherwise.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tilewright.core.errors import TilewrightError
from tilewright.core.memory_plan import MemoryPlan
from tilewright.memory.tracking.byte_tables import is_out_of_memory
from tilewright.memory.tracking.tracker import step_peak
from tilewright.parallel.agree import gather, named_ranks
from tilewright.parallel.launch import on_first
from tilewright.parallel.world import World
from tilewright.training.executor.base import Executor, StepResult
from tilewright.training.hooks.step_hook import Step, StepHook
from tilewright.training.runlog.rank_table import RankTable
from tilewright.training.runlog.signals import StopRequest

T = TypeVar("T")


class Agreement(StepHook):
    """Agreements of a run's processes, around each step where there are several; each method is called by all of
    them, in the same order. Of a process alone each returns its argument.

    Args:
        world: of the run.
        table: of several ranks: counts what steps took.
        messages: of this rank's allocator; those of others are added.
    """

    def __init__(
        self,
        world: World = World.alone(),  # noqa: B008 (frozen)
        table: RankTable | None = None,
        messages: list[str] | None = None,
    ) -> None:
        self.world, self.table = world, table
        self._messages = [] if messages is None else messages
        self._group = world.everyone.handle
        self.alone = self._group is None
        """True where there is one process."""
        self._asked = self.stop = StopRequest()
        """True where the run is to stop: of several ranks, where any of them was asked to, as of the last step."""
        self.save_due = False
        """True where minutes make a save due after this step: of this process, and once ranks have agreed of any."""

    def begin(self, stop: StopRequest) -> None:
        """Begin the agreement of ranks when the steps of a run do.

        Args:
            stop: what this process is asked for.
        """
        self._asked, self.stop = stop, stop if self.alone else StopRequest()

    # ---- between steps ----

    def before_step(self, step: Step) -> Step:
        """Agree on the step's longest row over all ranks before it begins. The ranks compute next."""
        self.world.waits()
        longest = self.most(-1 if step.row_length is None else step.row_length)
        self.world.works()
        if self.table is not None:
            self.table.begin_step(step.wait_s)
        return replace(step, row_length=None if longest < 0 else int(longest))

    def after_step(self, step: Step, result: StepResult) -> None:
        """Write the table of ranks after a step, if a line is due. If the folder is gone, all ranks learn it."""
        table = self.table
        if table is not None:
            table.end_step()
        self.agree()
        if table is not None and step.memory is not None:
            rows = table.rows(step_peak(step.memory["phases"]))
            self.on_first(lambda: table.write(step.number, rows))

    def agree(self) -> None:
        """Exchange among ranks why some were asked to stop, if minutes make a save due, and which pieces of the step
        were called again. All ranks have the same answers afterwards."""
        if self.alone:
            return
        self.world.waits()
        flags = torch.tensor([self._asked.reason is not None, self.save_due, bool(self._messages)], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        stops, self.save_due, tight = (bool(flag) for flag in flags.tolist())
        if tight:
            self._messages[:] = [message for of_rank in gather(self._group, self._messages) for message in of_rank]
        if stops:
            self.stop.request(self._reason(self._asked.reason))

    def _reason(self, stop: str | None) -> str:
        """The agreed reason to stop: that of the first rank that has one, with the ranks if it is not that of all."""
        reasons = {rank: reason for rank, reason in enumerate(gather(self._group, stop)) if reason is not None}
        first = next(iter(reasons.values()))
        return first if len(reasons) == self.world.size else f"{first} ({named_ranks(reasons)})"

    def on_first(self, work: Callable[[], T]) -> T:
        """Run work on the first rank and give all ranks its result: see `parallel.launch.on_first`."""
        return on_first(self.world, work)

    # ---- what plans rest on ----

    def most(self, value: float) -> float:
        """The largest value of any rank, agreed on."""
        if self.alone:
            return value
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return float(found)

    def least(self, value: float) -> float:
        """The smallest value of any rank, agreed on."""
        return -self.most(-value)

    def worst(self, peaks: Mapping[str, int]) -> dict[str, int]:
        """The highest peak of any rank, by phase, agreed on."""
        found: dict[str, int] = {}
        for of_rank in gather(self._group, dict(peaks)):
            for name, size in of_rank.items():
                found[name] = max(size, found.get(name, 0))
        return found

    # ---- acting together ----

    def apply(self, executor: Executor, memory_plan: MemoryPlan) -> None:
        """Apply a memory plan by agreement of all ranks, or on none if one of them fails.

        Raises:
            TilewrightError, torch.OutOfMemoryError: that of the first rank that cannot, on all.
        """
        if self.alone:
            return executor.apply_memory_plan(memory_plan)
        before = executor.memory_plan
        problem: TilewrightError | torch.OutOfMemoryError | None = None
        try:
            executor.apply_memory_plan(memory_plan)
        except TilewrightError as error:
            problem = error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = torch.OutOfMemoryError(f"rank {self.world.rank}: {str(error).splitlines()[0]}")
        found = next((one for one in gather(self._group, problem) if one is not None), None)
        if found is None:
            return None
        if problem is None:
            executor.apply_memory_plan(before)
        raise found


class PlannerOnFirst:
    """The planner of a run (`planner.replan.Replanner`), asked on the first rank; all have its answers, whatever its
    solver's time gave it.

    Args:
        planner: of this rank: None on all but the first.
        agreement: of the run.
    """

    def __init__(self, planner: Any, agreement: Agreement) -> None:
        self._planner, self._agreement = planner, agreement

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **factors: self._agreement.on_first(
            lambda: getattr(self._planner, method)(*args, **factors)
        )


def planner_on_first(find: Callable[[], Any], agreement: Agreement) -> Any:
    """Make the planner on the first rank alone by `find`; None if there is none."""
    mine = find() if agreement.world.is_first else None
    return PlannerOnFirst(mine, agreement) if agreement.on_first(lambda: mine is not None) else None

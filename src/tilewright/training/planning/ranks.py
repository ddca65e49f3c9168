"""What the ranks of a run agree on while it runs. Nothing of it exists in a run of one process.

What one rank alone sees (a signal, minutes that have passed, rows of another length, memory that runs short, a folder
that is gone) is brought to all before any of them acts on it: the next collective would wait for ever otherwise.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from tilewright import __version__
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.schema import flat
from tilewright.core.errors import ConfigError, TilewrightError
from tilewright.core.memory_plan import MemoryPlan
from tilewright.memory.tracking.format import is_out_of_memory
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.parallel.agree import gather
from tilewright.parallel.launch import on_first
from tilewright.parallel.liveness.failure import (
    Blame,
    RankEnd,
    RankFailedError,
    ending_with_others,
    is_timeout,
    speaks_for_others,
)
from tilewright.parallel.liveness.heartbeat import Heartbeat, Watch, records, watching
from tilewright.parallel.liveness.stall import Stalls
from tilewright.parallel.world import World
from tilewright.planner.summary import PlanSummary
from tilewright.training.executor.base import Executor
from tilewright.training.runlog.rank_table import RankTable
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder

if TYPE_CHECKING:  # the solver is loaded by who plans
    from tilewright.planner.replan import Replan, Replanner

T = TypeVar("T")


class Agreement:
    """Decisions of one run. Every method is called by all ranks, in the same order.

    Args:
        world: of more than one process.
        heartbeat: told where this rank is.
        table: counts what steps took.
    """

    def __init__(self, world: World, heartbeat: Heartbeat, table: RankTable) -> None:
        assert world.control_group is not None, "one process agrees with nobody"
        self.world = world
        self.heartbeat = heartbeat
        self.table = table
        self._group = world.control_group

    # ---- between steps ----

    def before_step(self, length: int | None, data_s: float) -> int | None:
        """Tokens of the longest row of any rank; None of images. The executor is called next.

        Args:
            length: of this rank's rows.
            data_s: seconds that it waited for them.
        """
        self.heartbeat.waits()
        found = self.longest(length)
        self.heartbeat.works()
        self.table.begin_step(data_s)
        return found

    def after_step(self, stop: str | None, save_due: bool, messages: list[str]) -> tuple[str | None, bool]:
        """Why the run is to stop (None where no rank was asked to), and whether a save is due on any of them.

        Args:
            stop: why this rank was asked to.
            save_due: on this rank.
            messages: of this rank's allocator where a piece of the step was called again. What others said is added.
        """
        self.table.end_step()
        self.heartbeat.waits()
        flags = torch.tensor([stop is not None, save_due, bool(messages)], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        stops, due, tight = (bool(flag) for flag in flags.tolist())
        if tight:
            messages[:] = [message for of_rank in gather(self._group, messages) for message in of_rank]
        return self._reason(stop) if stops else None, due

    def _reason(self, stop: str | None) -> str:
        """The reason of the first rank that has one; which ranks, where it is not all."""
        reasons = {rank: reason for rank, reason in enumerate(gather(self._group, stop)) if reason is not None}
        first = next(iter(reasons.values()))
        return first if len(reasons) == self.world.size else f"{first} ({_ranks(reasons)})"

    def on_first(self, work: Callable[[], T]) -> T:
        """See `parallel.launch.on_first`."""
        return on_first(self.world, work)

    def write_table(self, step: int, peak_bytes: int) -> None:
        """Write the table of ranks; a folder that is gone by then is met by all."""
        rows = self.table.rows(peak_bytes)
        self.on_first(lambda: self.table.write(step, rows))

    def all_of(self, flag: bool) -> bool:
        """Whether it is so on all ranks."""
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return bool(found)

    # ---- what plans rest on ----

    def most(self, value: float) -> float:
        """The largest value of any rank."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def least(self, value: float) -> float:
        """The smallest value of any rank."""
        return self._reduce(value, dist.ReduceOp.MIN)

    def longest(self, length: int | None) -> int | None:
        """Tokens of the longest row on any rank; None of images."""
        found = self.most(-1 if length is None else length)
        return None if found < 0 else int(found)

    def worst(self, peaks: Mapping[str, int]) -> dict[str, int]:
        """The highest peak of any rank, by phase."""
        found: dict[str, int] = {}
        for of_rank in gather(self._group, dict(peaks)):
            for name, size in of_rank.items():
                found[name] = max(size, found.get(name, 0))
        return found

    def _reduce(self, value: float, operation: Any) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, operation, group=self._group)
        return float(found)

    # ---- acting together ----

    def apply(self, executor: Executor, memory_plan: MemoryPlan) -> None:
        """Every layer is treated so from now on, on all ranks or on none.

        Raises:
            TilewrightError, torch.OutOfMemoryError: that of the first rank that cannot, on all.
        """
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
            return
        if problem is None:
            executor.apply_memory_plan(before)
        raise found


class RankWatch:
    """This rank's heartbeat and its eye on the others, from before the data is prepared to the end of the run.

    Args:
        folder: of the run.
        world: of more than one process. That of the watch has the heartbeat.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.heartbeat = Heartbeat(folder, world.rank)
        self.world = replace(world, heartbeat=self.heartbeat)
        self.recorder: MetricsLogger | None = None
        """While there is one, on the first rank: told what is seen, from the watching thread."""
        self._folder = folder
        self._watch = Watch(folder, world.size, world.rank)

    @contextmanager
    def running(self) -> Iterator["RankWatch"]:
        """Beats and watches inside. Ends with other ranks: see `blaming`, and in ten seconds where this one waits for
        one that failed or hangs and no connection breaks."""
        blame = Blame(self._folder, self.world.rank, Stalls(self.world.size, self.world.timeout_s))
        ends = ending_with_others(blame, self._end)
        with self.heartbeat, watching(self._watch, self._tell), ends, self.blaming():
            yield self

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """An error of torch inside becomes that of the rank whose fault it is, where another one has failed or hangs.

        Raises:
            RankFailedError: instead.
        """
        try:
            yield
        except RuntimeError as error:  # gloo, NCCL: of a connection that broke; or of this rank alone
            if is_timeout(error) or any(record.timed_out for record in records(self._folder).values()):
                self.heartbeat.give_up()
            found = Blame(self._folder, self.world.rank).wait(error)
            if found is None:
                raise
            raise self._followed(found) from error

    def _followed(self, found: RankEnd) -> RankFailedError:
        """The error of this rank, written down."""
        error = found.error(self.world.size)
        self.heartbeat.fail(error, follows=error.failed != self.world.rank)
        if self.recorder is not None:
            self.recorder.event(self.recorder.log.step_done, "stop", str(error), rank=error.failed)
        return error

    def _end(self, found: RankEnd) -> None:
        """End this process from the watching thread: the main thread waits in a collective that does not end."""
        error = self._followed(found)
        if speaks_for_others(self.world.rank, error.failed):
            print(f"tilewright: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)

    def agreement(
        self, folder: RunFolder, plan: PlanSummary, memory_tracker: MemoryTracker, recorder: MetricsLogger
    ) -> Agreement:
        """What this run agrees with: from here on phases of a step are those of memory, and events are recorded."""
        self.recorder = recorder
        memory_tracker.on_phase = self.heartbeat.phase
        planned = 0 if plan.unknown else plan.phase_bytes(plan.step_phase) + plan.reserve_bytes
        group = self.world.control_group
        assert group is not None, "of several ranks"
        return Agreement(self.world, self.heartbeat, RankTable(group, folder, memory_tracker.device, planned))

    def _tell(self, line: str) -> None:
        if self.recorder is not None and self.world.is_first:
            self.recorder.event(self.recorder.log.step_done, "rank", line)
        else:
            print(f"rank: {line}", file=sys.stderr, flush=True)


class PlannerOnFirst:
    """The planner of a run, asked on the first rank; all have its answers, whatever its solver's time gave it.

    Args:
        planner: of this rank: None on all but the first.
        agreement: of the run.
    """

    def __init__(self, planner: "Replanner | None", agreement: Agreement) -> None:
        self._planner: Any = planner
        self._agreement = agreement

    def plan(self, device_bytes: float, seq_len: int | None = None, **factors: float) -> "Replan | None":
        """See `planner.replan.Replanner.plan`."""
        return self._agreement.on_first(lambda: self._planner.plan(device_bytes, seq_len, **factors))

    def smallest(self, seq_len: int | None = None, **factors: float) -> "Replan | None":
        """See `planner.replan.Replanner.smallest`."""
        return self._agreement.on_first(lambda: self._planner.smallest(seq_len, **factors))

    def predict(self, memory_plan: MemoryPlan, seq_len: int | None = None, **factors: float) -> "Replan":
        """See `planner.replan.Replanner.predict`."""
        return self._agreement.on_first(lambda: self._planner.predict(memory_plan, seq_len, **factors))


def planner_on_first(find: "Callable[[], Replanner | None]", agreement: Agreement) -> "PlannerOnFirst | None":
    """The planner that `find` gives, made on the first rank alone; None where there is none."""
    mine = find() if agreement.world.is_first else None
    return PlannerOnFirst(mine, agreement) if agreement.on_first(lambda: mine is not None) else None


def _ranks(ranks: Mapping[int, str]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def facts_of(recipe: Recipe) -> dict[str, str]:
    """What must be the same on all ranks before they make groups."""
    digest = xxhash.xxh3_128_hexdigest(recipe.model_dump_json().encode())
    return {"recipe": digest, "version of tilewright": __version__, "version of torch": torch.__version__}


def settings_of(recipe: Recipe) -> dict[str, str]:
    """The settings of a recipe, to name those in which ranks differ."""
    return {f"setting {name}": repr(value) for name, value in flat(recipe.model_dump(mode="json")).items()}


def check_world(world: World, recipe: Recipe) -> None:
    """What can be known to go wrong on these ranks before anything is prepared.

    Raises:
        ConfigError: fewer rows in a step than ranks, or an executor that does not shard.
    """
    if world.size == 1:
        return
    if not recipe.memory.can.shard and world.sizes.dp_shard > 1:
        raise ConfigError(
            "Layer-major executor does not shard",
            got=f'{world.size} processes, parallel.dp_shard = {world.sizes.dp_shard}, memory.executor = "layer_major"',
            need="copies of the model, or the standard executor",
            try_=f"--parallel.dp_replicate {world.size}, or --memory.executor standard",
        )
    check_shared(recipe, world.size)


def check_shared(recipe: Recipe, ranks: int) -> None:
    """What several processes cannot share, known before there are any.

    Raises:
        ConfigError: fewer samples in a step than processes.
    """
    if ranks == 1:
        return
    rows = 2 if recipe.data.format == "preferences" else 1
    if recipe.train.global_batch_size // rows < ranks:
        raise ConfigError(
            "Fewer samples per step than processes",
            where="train.global_batch_size",
            got=f"global_batch_size = {recipe.train.global_batch_size}, {ranks} processes",
            need=f"at least {ranks * rows}",
            try_=f"--train.global_batch_size {ranks * rows}",
        )

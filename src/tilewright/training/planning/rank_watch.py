"""Ranks of a run that watch each other, and what must hold before they begin. A process alone has none to watch."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from tilewright import __version__
from tilewright.core.config.executors import Capabilities
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.setting_names import fields, flat
from tilewright.core.errors import ConfigError
from tilewright.parallel.launch import PIPELINES, on_first
from tilewright.parallel.liveness.heartbeat import Heartbeat, Watch, records, watching
from tilewright.parallel.liveness.rank_failure import (
    Blame,
    RankEnd,
    RankFailedError,
    Stalls,
    ending_with_others,
    is_running,
    is_timeout,
    speaks_for_others,
)
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import World
from tilewright.planner.cost.rank_share import check_shared
from tilewright.planner.plan import Plan
from tilewright.training.assemble import Components
from tilewright.training.hooks.rank_agreement import Agreement
from tilewright.training.runlog.rank_table import RankTable
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder


class LoneWatch:
    """The watch of a process that has no other ranks to watch."""

    world = World.alone()

    @contextmanager
    def running(self) -> Iterator["LoneWatch"]:
        """Inside, the ranks are watched: from before the data is prepared to the end of the run."""
        yield self

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Mark the code inside as waiting for other ranks, so that an error can name the rank at fault."""
        yield

    @contextmanager
    def recording(self, recorder: MetricsLogger | None) -> Iterator[None]:
        """Observations of the watch over ranks inside are recorded."""
        yield

    def agreement(self, folder: RunFolder, plan: Plan, parts: Components) -> Agreement:
        """The agreement of this run's watched ranks."""
        return Agreement()


class RankWatch(LoneWatch):
    """This rank's heartbeat and its eye on the others, from before the data is prepared to the end of the run.

    Args:
        folder: of the run.
        world: of more than one process. That of the watch has the heartbeat.
        resumes: there will be checkpoints to continue from.
        tell_end: told why the watching thread ends this process; None: the user is.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        resumes: bool = True,
        tell_end: Callable[[RankFailedError], None] | None = None,
    ) -> None:
        self.heartbeat = Heartbeat(folder, world.rank)
        self.world = replace(world, heartbeat=self.heartbeat)
        self._recorder: MetricsLogger | None = None
        """While there is one, on the first rank: told what is seen, from the watching thread."""
        self._folder = folder
        self._watch = Watch(folder, world.size, world.rank)
        self._resumes, self._tell_end = resumes, tell_end or self._print_end

    @contextmanager
    def running(self) -> Iterator["RankWatch"]:
        """Watch ranks inside, with beats of this one. Ends with other ranks: see `blaming`, and in ten seconds where
        this one waits for one that failed or hangs and no connection breaks."""
        blame = Blame(self._folder, self.world.rank, Stalls(self.world.size, self.world.timeout_s))
        ends = ending_with_others(blame, self._end)
        with self.heartbeat, watching(self._watch, self._tell), ends, self.blaming():
            yield self

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Raise an error of torch inside as that of the rank at fault, if another rank has failed or hangs.

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
        """The error of this watched rank, written down."""
        error = found.error(self.world.size, resumes=self._resumes)
        self.heartbeat.fail(error, follows=error.failed != self.world.rank)
        if self._recorder is not None:
            self._recorder.event(self._recorder.log.step_done, "stop", str(error), rank=error.failed)
        return error

    def _end(self, found: RankEnd) -> None:
        """End this rank's process from the watching thread: the main thread waits in a collective that does not end."""
        error = self._followed(found)
        self._tell_end(error)
        os._exit(error.exit_code)

    def _print_end(self, error: RankFailedError) -> None:
        if speaks_for_others(self.world.rank, error.failed):
            print(f"tilewright: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def recording(self, recorder: MetricsLogger | None) -> Iterator[None]:
        """Inside, observations of the ranks are recorded: see `LoneWatch.recording`."""
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def agreement(self, folder: RunFolder, plan: Plan, parts: Components) -> Agreement:
        """Make the agreement of the watched ranks; from here on the phases of a step are those of memory."""
        parts.memory_tracker.on_phase = self.heartbeat.phase
        planned = 0 if plan.shape.unknown else plan.allocated_bytes + plan.reserve_bytes
        group = self.world.everyone.handle
        assert group is not None, "of several ranks"
        table = RankTable(group, folder, parts.memory_tracker.device, planned)
        return Agreement(self.world, table, parts.executor.transaction.oom_messages)

    def _tell(self, line: str) -> None:
        if self._recorder is not None and self.world.is_first:
            self._recorder.event(self._recorder.log.step_done, "rank", line)
        else:
            print(f"rank: {line}", file=sys.stderr, flush=True)


def watch_of(folder: Path, world: World) -> LoneWatch:
    """The watch over the ranks of a run in this folder."""
    return LoneWatch() if world.size == 1 else RankWatch(folder, world)


@contextmanager
def watched(world: World, shared: Path, tell_end: Callable[[RankFailedError], None] | None = None) -> Iterator[World]:
    """The ranks of work that has no run folder watch each other inside as those of a run do; gives their world.

    Args:
        world: of any size; a single process has no others to watch.
        shared: a folder that all machines of the run see. On one machine a temporary folder takes the records.
        tell_end: see `RankWatch`.
    """
    if world.size == 1:
        yield world
        return

    def make() -> str:
        one_machine = world.local_size == world.size
        parent, prefix = (Path(tempfile.gettempdir()), "tilewright-ranks-") if one_machine else (shared, ".ranks-")
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{prefix}*"):  # by ranks of which the last one was killed
            _remove_unread(left)
        return tempfile.mkdtemp(prefix=prefix, dir=parent)

    folder = Path(on_first(world, make, named="the records of ranks"))
    try:
        with RankWatch(folder, world, resumes=False, tell_end=tell_end).running() as watch:
            yield watch.world
    finally:
        _remove_unread(folder, world.size)


def _remove_unread(folder: Path, ranks: int = 1) -> None:
    """Remove the records of watched ranks, at least so many, none of which runs any more. Another user's stay."""
    found = records(folder).values()
    if len(found) >= ranks and not any(map(is_running, found)):
        shutil.rmtree(folder, ignore_errors=True)


def facts_of(recipe: Recipe) -> dict[str, str]:
    """Facts that must be equal on all ranks before they make groups; the watch compares them."""
    digest = xxhash.xxh3_128_hexdigest(repr(settings_of(recipe)).encode())
    return {"recipe": digest, "version of tilewright": __version__, "version of torch": torch.__version__}


def settings_of(recipe: Recipe) -> dict[str, str]:
    """The settings of a recipe that must be equal on watched ranks: all but folders that are made, such as caches. Each
    machine may have these elsewhere."""
    values = flat(recipe.model_dump(mode="json"))
    made = {item.path for item in fields() if item.place is not None and item.place.made}
    return {f"setting {name}": repr(value) for name, value in values.items() if name not in made}


def check_world(world: World, recipe: Recipe, can: Capabilities) -> None:
    """Check the world of watched ranks: problems that are known before anything is prepared.

    Raises:
        ConfigError: fewer rows in a step than ranks, an executor that does not shard or has no stages, or a schedule
            that does not take the micro-batches of a step.
        HardwareError: stages, and a torch that has no such pipelines.
    """
    if world.size == 1:
        return
    if world.sizes.pp > 1:
        check_stages(world, recipe, can)
    if not can.shard and world.sizes.dp_shard > 1:
        raise ConfigError(
            "Layer-major executor does not shard",
            got=f'{world.size} processes, parallel.dp_shard = {world.sizes.dp_shard}, memory.executor = "layer_major"',
            need="copies of the model, or the standard executor",
            try_=f"--parallel.dp_replicate {world.size}, or --memory.executor standard",
        )
    check_shared(recipe, world.data.size)


def check_stages(world: World, recipe: Recipe, can: Capabilities) -> None:
    """Check the stages of watched ranks: problems of a pipeline that are known before anything is prepared.

    Raises:
        ConfigError: see `check_world`.
        HardwareError: see `check_world`.
    """
    PIPELINES.check()
    if not can.stages:
        raise ConfigError(
            "Executor without stages",
            got=f"parallel.pp = {world.sizes.pp}, and an executor that holds all layers on each process",
            need="the executor that the recipe would have itself",
            try_="train(loaded) without executor=, or --parallel.pp 1",
        )
    if recipe.data.rows == "documents":
        return  # as many micro-batches as the schedule takes: see `parallel.pipeline.assignment.Room`
    train = recipe.train
    rows = -(-train.global_batch_size // world.data.size)
    count = -(-rows // train.micro_batch_size)
    Pipeline.of(recipe.parallel).check_count(count, train.micro_batch_size, world.data.size)

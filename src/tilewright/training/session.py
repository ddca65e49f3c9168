"""`train`: from a recipe to a finished, stopped or failed run, everything about it in the run folder.

    recipe -> assemble (machine, data, plan, model, precision, optimizer, executor)
           -> resume (newest valid checkpoint) -> run.Run.train -> metrics, events, checkpoints

This file connects; the loop over steps is in `run`. The report is written by the command line after `train`
returns or raises.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.load import Loaded, write_run_toml
from tilewright.core.log import Pulse, say
from tilewright.data.batches.state.move_log import FILE as MIXTURE
from tilewright.data.dataset.remote.prepared_shards import PreparedShards
from tilewright.memory.tracking.malloc import trim_malloc
from tilewright.models.base.protocols import Model
from tilewright.parallel.launch import in_turn, launched, on_first
from tilewright.parallel.liveness.heartbeat import RankRecord, take_lost
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import World
from tilewright.planner.plan_file import PlanFile
from tilewright.training.assemble import Components, HookFactory, RunContext, build, set_up
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore
from tilewright.training.components.lifecycle import switches
from tilewright.training.components.model import pinned
from tilewright.training.components.reference_logprobs import attach_reference
from tilewright.training.components.remote_data_hook import FarHook
from tilewright.training.dry_run import dry_run as run_dry
from tilewright.training.executor.base import ExecutorKind
from tilewright.training.executor.executor_kinds import check_executor, executor_of
from tilewright.training.executor.step_transaction import MAX_BAD_STEPS, UnrecoverableStepError
from tilewright.training.hooks.energy_hook import RunEnergy, open_energy
from tilewright.training.hooks.mixing_setup import mixing_hooks
from tilewright.training.hooks.pipeline_setup import domain_hooks
from tilewright.training.hooks.replan_setup import replanner_for
from tilewright.training.hooks.step_hook import RestartError
from tilewright.training.planning.forecast import forecast_of
from tilewright.training.planning.minutes import (
    LONG,
    Length,
    StepTimes,
    is_open,
    steps_within,
    with_known_steps,
    with_time_left,
)
from tilewright.training.planning.pace import pace_of
from tilewright.training.planning.rank_watch import LoneWatch, check_world, facts_of, settings_of, watch_of
from tilewright.training.planning.resolve_plan import load_run_plan, write_plan
from tilewright.training.planning.trial_steps import time_steps
from tilewright.training.resume import ResumePoint, find, open_folder, restore
from tilewright.training.run import Run, RunResult
from tilewright.training.runlog.record_files import RunLog
from tilewright.training.runlog.recorder import MetricsLogger, open_sinks
from tilewright.training.runlog.run_folder import RunFolder
from tilewright.training.runlog.signals import StopRequest
from tilewright.training.runlog.train_progress import TrainProgress, open_progress, open_pulse


def train(
    loaded: Loaded,
    *,
    dry_run: bool = False,
    on_setup: Callable[[RunContext], None] | None = None,
    on_begin: Callable[[], None] | None = None,
    hooks: Sequence[HookFactory] = (),
    executor: ExecutorKind | None = None,
) -> RunResult:
    """Run a training session: train what a recipe describes, or continue where its run folder stops.

    Args:
        loaded: a recipe from `core.config.load.load_recipe`.
        dry_run: run two real steps, print planned beside measured memory and time, keep nothing.
        on_setup: called with data and plan before the model is made; not of a dry run.
        on_begin: called before the first step, and again where the run is made again; not of a dry run.
        hooks: each is called once the model is made, and gives what rides along with the steps. A run that times its
            steps, or goes back to a checkpoint, is made again, hooks too.
        executor: runs the steps instead of the one that the recipe names, at whose costs they are planned.

    Raises:
        TilewrightError: its subclass says what kind of trouble; everything that was done is written down before.
    """
    began = time.perf_counter()
    if executor is not None:
        check_executor(loaded.recipe, executor.capabilities)
    parallel = loaded.recipe.parallel
    with launched(
        MeshSizes.of(parallel),
        device=loaded.recipe.run.device,
        timeout_s=60 * parallel.timeout_minutes,
        facts=facts_of(loaded.recipe),
        details=partial(settings_of, loaded.recipe),
    ) as world:
        check_world(world, loaded.recipe, executor_of(loaded.recipe, executor).capabilities)
        if dry_run:
            return RunResult(None, run_dry(loaded, world, hooks, executor))
        with (
            _opened(loaded, world) as (folder, store, watch, lost),
            open_energy(loaded.recipe.energy, watch.world, folder, loaded.recipe.run.device) as energy,
        ):
            session = TrainSession(
                loaded, folder, store, watch, began, on_setup, on_begin, hooks, executor, lost, energy
            )
            return session.train()


@contextmanager
def _opened(
    loaded: Loaded, world: World
) -> Iterator[tuple[RunFolder, CheckpointStore, LoneWatch, tuple[RankRecord, ...]]]:
    """Open a session of training: the folder of a run, locked, its checkpoints, its ranks, watched, and those that were
    lost before."""
    recipe = loaded.recipe
    folder, moved_to = open_folder(recipe, loaded.name, world)
    section, path = recipe.checkpoint, folder.path
    store = CheckpointStore(folder.checkpoints, keep=section.keep_latest_k, background=section.async_save, world=world)
    try:
        if moved_to is not None:
            say(f"the run that was in {path} is now {moved_to}")
        lost = on_first(world, partial(take_lost, path), named="the records of ranks before this run")
        with watch_of(path, world).running() as watch:  # from here on a rank that is gone is named
            store.world = watch.world
            try:
                yield folder, store, watch, lost
            finally:
                store.wait()  # other ranks can finish what is being written until they hear that this one failed
    finally:
        store.close()
        folder.close()


@dataclass
class TrainSession:
    """One call of `train`: the run folder while it is open, and the runs assembled in it, one after the other."""

    loaded: Loaded
    folder: RunFolder
    store: CheckpointStore
    watch: LoneWatch
    began: float
    on_setup: Callable[[RunContext], None] | None
    on_begin: Callable[[], None] | None
    hooks: Sequence[HookFactory]
    executor: ExecutorKind | None
    lost: tuple[RankRecord, ...]
    """Of ranks that were gone at the end of the run before."""
    energy: RunEnergy | None
    """Energy that the run takes, where that is measured."""
    run_plan: PlanFile | None = None
    """Plan that the run in the folder began under."""
    restarted: dict[str, Any] = field(default_factory=dict)
    """Settings that a hook has asked for, by name."""
    left_out: set[int] = field(default_factory=set)
    """Steps, counted from 0, that could not be undone."""

    @property
    def world(self) -> World:
        """The processes of a training session's run."""
        return self.watch.world

    def train(self) -> RunResult:
        """Train a session from the newest checkpoint of the folder, where steps are left. A step that cannot be undone
        sends the run back to its newest checkpoint, and is left out from then on.

        Raises:
            UnrecoverableStepError: the third one.
        """
        self.world.at("search for a checkpoint")
        self.loaded = in_turn(self.world, lambda: pinned(self.loaded, self.folder.path))
        found = self._newest()
        train = self.loaded.recipe.train
        if not is_open(self.loaded.recipe) and found.step >= train.steps:
            more = "train.minutes, or give train.steps," if train.minutes else "train.steps"
            say(f"{self.folder.path} has reached step {found.step} of {train.steps}; raise {more} to continue.")
            return RunResult(self.folder.path, found.step)
        found = replace(found, lost=self.lost)
        while True:
            try:
                return self._train_from(found)
            except RestartError as asked:
                self.restarted |= asked.settings
                self.on_setup = None  # it has been told
            except UnrecoverableStepError as lost:
                self.left_out.add(lost.step)
                self.on_setup = None  # it has been told
                if len(self.left_out) >= MAX_BAD_STEPS:
                    raise
                say(f"step {lost.step + 1} is left out")
            self.store.wait()
            found = self._newest()
            say(f"the run continues from step {found.step}")

    def _newest(self) -> ResumePoint:
        """The checkpoint that a session continues from; the recipe is the one with the steps and the plan of the
        folder's run."""

        def look() -> tuple[Loaded, PlanFile | None, ResumePoint]:
            loaded, run_plan, resuming = _with(self.loaded, self.restarted), None, bool(self.store.paths())
            if resuming:
                loaded, run_plan = load_run_plan(loaded, self.folder.path)
            loaded = with_known_steps(loaded, self.folder.path, resuming=resuming)
            found = find(self.folder, self.store, loaded.recipe)
            return with_time_left(loaded, found.step, found.elapsed_s), run_plan, found

        self.loaded, self.run_plan, found = on_first(self.world, look)
        return found

    def _train_from(self, found: ResumePoint) -> RunResult:
        with open_pulse() as pulse:
            resuming = found.checkpoint is not None
            setup = set_up(
                self.loaded, world=self.world, run_plan=self.run_plan, resuming=resuming, at=pulse.at,
                executor=self.executor,
            )  # fmt: skip
            if self.on_setup is not None:
                self.on_setup(setup)
            self.store.background = setup.recipe.checkpoint.async_save  # a plan may have changed it
            if is_open(setup.recipe):
                times = self._timed(setup, found, pulse)
                if isinstance(times, str):
                    say(f"{times} while steps were timed: nothing was to be saved, the same command starts again")
                    return RunResult(self.folder.path, found.step, stopped=times)
                many = partial(steps_within, setup.recipe, times, done=found.step, elapsed_s=found.elapsed_s)
                setup = setup.lasting(on_first(self.world, many))
                found = found.at_length(setup.recipe, times.spent_s)
            with self._assembled(setup, found, pulse) as run:
                if self.on_begin is not None:
                    self.on_begin()
                run.begin(self.began)
                if self.energy is not None:
                    run.recorder.event(found.step, "energy", self.energy.said())
                with StopRequest() as stop, self.watch.blaming():
                    result = run.train(stop)
                    if self.energy is not None:
                        self.energy.finish(run.step, run.parts.counters.tokens, run.recorder.event)
                    return result

    def _timed(self, setup: RunContext, found: ResumePoint, pulse: Pulse) -> StepTimes | str:
        """Seconds of a session's next steps, by steps that are thrown away; the reason where a stop is asked for
        meanwhile."""
        say(f"train.minutes = {setup.recipe.train.minutes:g}: the first steps are timed, then the run begins")
        far_off = setup.lasting(Length(LONG, "", "", {}))
        assembled = self._assembled(far_off, found, pulse, shown=False)
        with assembled as run, StopRequest() as stop, self.watch.blaming():
            pulse.at("timing steps, the first of which compiles")
            times = time_steps(run, stop)
        del run
        gc.collect()  # the model that steps were timed with goes before the next one is made
        trim_malloc()
        return times

    @contextmanager
    def _assembled(self, setup: RunContext, found: ResumePoint, pulse: Pulse, *, shown: bool = True) -> Iterator[Run]:
        """The session's run, assembled at the step that it continues from, closed at the end.

        Args:
            shown: False: nothing of it is shown or written.
        """
        recipe, path, resumed = setup.recipe, self.folder.path, found.checkpoint is not None
        follows = not self.world.is_first or not shown
        sinks = open_sinks(() if follows else recipe.log.sinks, path, recipe.model_dump(mode="json"))
        pulse.at("making the model")
        self.world.begin("making the model")
        parts = build(setup, fresh=not resumed)
        parts.hooks += domain_hooks(setup.world, parts.stream, setup.device)
        if isinstance(setup.prepared, PreparedShards):
            parts.hooks += (FarHook(setup.prepared, parts.stream, setup.world, setup.device),)
        if setup.recipe.data.mixing.policy != "off":
            parts.hooks += mixing_hooks(setup, parts)
        parts.hooks += tuple(make(setup, parts) for make in self.hooks)
        recorder = MetricsLogger(
            RunLog(path, resumed_step=found.step if resumed else None, elapsed_s=found.elapsed_s, follows=follows),
            open_progress(pulse, follows=follows) if shown else TrainProgress(),
            sinks,
            steps=recipe.train.steps,
            memory_limit=setup.memory_limit,
            scaled=parts.scaler is not None,
        )
        try:
            for text, numbers in setup.plan.events:
                recorder.event(found.step, "plan", text, **numbers)
            self.world.at("reference")
            pulse.at("")  # it has a bar of its own
            for data in (setup.prepared, setup.other):
                attach_reference(recipe, data, setup.device, lambda: _starting(setup, parts, found), self.world)
            pulse.at("loading the checkpoint" if resumed else "starting")
            self.world.at("restore")
            restore(found, parts, recorder, path / MIXTURE if shown else None)
            self.world.wait_for_all()
            if shown:
                _write_facts(self.folder, setup, parts)
            with self.watch.recording(recorder if shown else None):  # of what is only timed nothing is told
                agreement = self.watch.agreement(self.folder, setup.plan, parts)
                replanner = replanner_for(setup, parts, recorder, agreement=agreement)
                first = parts.modes.last_from(parts.counters.step + 1)
                steps, measures = recipe.train.steps, setup.world.is_first
                pace = pace_of(setup.plan, setup.site, first, steps, measures=measures)
                counts = () if self.energy is None or not shown else (self.energy.hook(parts),)
                # Ranks agree on the rows' length before memory is planned for it, and memory is before it is taken.
                hooks = *((agreement,) * (not agreement.alone)), replanner, *parts.hooks, *(pace,) * shown, *counts
                yield Run(
                    setup, parts, parts.state(), self.store, self.folder, recorder, replanner, agreement, hooks,
                    resumed=resumed, left_out=frozenset(self.left_out),
                )  # fmt: skip
        finally:
            parts.close()
            recorder.close()


def _with(loaded: Loaded, settings: Mapping[str, Any]) -> Loaded:
    """The session's recipe with settings that a hook has asked for."""
    sources = loaded.sources | dict.fromkeys(settings, "measured while the run continued")
    return replace(loaded, recipe=changed(loaded.recipe, settings), sources=sources) if settings else loaded


@contextmanager
def _starting(setup: RunContext, parts: Components, found: ResumePoint) -> Iterator[Model]:
    """The model of a session with the weights that training begins with: of a run that resumes, one beside its own."""
    if found.checkpoint is None:
        yield parts.model
        return
    first = build(setup, fresh=True)
    try:
        yield first.model
    finally:
        first.close()


def _write_facts(folder: RunFolder, setup: RunContext, parts: Components) -> None:
    """Write the facts about a session's run that are known before its first step; the first of several ranks writes
    it."""

    expected = forecast_of(setup, parts) if setup.world.size > 1 else None

    def write() -> None:
        write_run_toml(setup.loaded, folder.recipe)
        more = {"kernels": setup.kernels.explain(), "matmul_switches": switches()}
        folder.write_json("machine.json", setup.machine.to_json() | more)
        told = {} if expected is None else {"simulated": expected.to_json()}
        folder.write_json("plan.json", setup.plan.to_json() | told)
        write_plan(setup.plan, folder.path)
        folder.write_json("data.json", {"fingerprint": setup.prepared.fingerprint, **setup.prepared.summary})
        folder.write_json("precision.json", parts.modes.rows())

    on_first(setup.world, write)
    setup.save_tokenizer(folder.path)
    folder.link_latest()

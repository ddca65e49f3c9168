"""`train`: from a recipe to a finished, stopped or failed run, everything about it in the run folder.

    recipe -> assemble (machine, data, plan, model, precision, optimizer, executor)
           -> resume (newest valid checkpoint) -> run.Run.train -> metrics, events, checkpoints

This file connects; the loop over steps is in `run`. The report is written by the command line after `train`
returns or raises.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from tilewright.core.config.load import Loaded, write_run_toml
from tilewright.core.log import Pulse, say
from tilewright.memory.tracking.malloc import trim_malloc
from tilewright.models.base.protocols import Model
from tilewright.parallel.launch import in_turn, launched, on_first
from tilewright.parallel.liveness.heartbeat import RankRecord, take_lost
from tilewright.parallel.world import World
from tilewright.planner.plan_file import PlanFile
from tilewright.training.assemble import Components, RunContext, build, set_up
from tilewright.training.checkpoint.store import CheckpointStore
from tilewright.training.components.matmul_switches import switches
from tilewright.training.components.pinned import pinned
from tilewright.training.components.reference import attach_reference
from tilewright.training.dry_run import dry_run as run_dry
from tilewright.training.executor.bad_steps import MAX_BAD_STEPS, UnrecoverableStepError
from tilewright.training.planning.minutes import (
    LONG,
    Length,
    StepTimes,
    is_open,
    steps_within,
    with_known_steps,
    with_time_left,
)
from tilewright.training.planning.ranks import RankWatch, check_world, facts_of, settings_of
from tilewright.training.planning.resolve import load_run_plan
from tilewright.training.planning.trial import time_steps
from tilewright.training.replan_setup import replanner_for
from tilewright.training.resume import ResumePoint, find, open_folder, restore
from tilewright.training.run import Run, RunResult
from tilewright.training.runlog.files import RunLog
from tilewright.training.runlog.progress import NoProgress, open_progress, open_pulse
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder
from tilewright.training.runlog.signals import StopRequest
from tilewright.training.runlog.sinks import open_sinks


def train(loaded: Loaded, *, dry_run: bool = False, on_setup: Callable[[RunContext], None] | None = None) -> RunResult:
    """Train what a recipe describes, or continue where its run folder stops.

    Args:
        loaded: a recipe from `core.config.load.load_recipe`.
        dry_run: run two real steps, print planned beside measured memory and time, keep nothing.
        on_setup: called with data and plan before the model is made; not of a dry run.

    Raises:
        TilewrightError: its subclass says what kind of trouble; everything that was done is written down before.
    """
    began = time.perf_counter()
    parallel = loaded.recipe.parallel
    with launched(
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        device=loaded.recipe.run.device,
        timeout_s=60 * parallel.timeout_minutes,
        facts=facts_of(loaded.recipe),
        details=partial(settings_of, loaded.recipe),
    ) as world:
        check_world(world, loaded.recipe)
        if dry_run:
            return RunResult(None, run_dry(loaded, world))
        return _open_and_train(loaded, world, began, on_setup)


def _open_and_train(
    loaded: Loaded, world: World, began: float, on_setup: Callable[[RunContext], None] | None
) -> RunResult:
    recipe = loaded.recipe
    folder, moved_to = open_folder(recipe, loaded.name, world)
    section = recipe.checkpoint
    store = CheckpointStore(folder.checkpoints, keep=section.keep_latest_k, background=section.async_save, world=world)
    try:
        if moved_to is not None:
            say(f"the run that was in {folder.path} is now {moved_to}")
        lost = on_first(world, partial(take_lost, folder.path), named="the records of ranks before this run")
        if world.size == 1:
            return _find_and_train(loaded, folder, store, lost, began, None, on_setup)
        with RankWatch(folder.path, world).running() as watch:  # from here on a rank that is gone is named
            store.world = watch.world
            try:
                return _find_and_train(loaded, folder, store, lost, began, watch, on_setup)
            finally:
                store.wait()  # the others can finish what is being written until they hear that this rank has failed
    finally:
        store.close()
        folder.close()


def _find_and_train(
    loaded: Loaded,
    folder: RunFolder,
    store: CheckpointStore,
    lost: tuple[RankRecord, ...],
    began: float,
    watch: RankWatch | None,
    on_setup: Callable[[RunContext], None] | None,
) -> RunResult:
    """Train from the newest checkpoint of the folder, where steps are left."""
    world = World.alone() if watch is None else watch.world
    world.at("search for a checkpoint")
    loaded = in_turn(world, lambda: pinned(loaded, folder.path))
    loaded, run_plan, found = on_first(world, partial(_newest, loaded, folder, store))
    train = loaded.recipe.train
    if not is_open(loaded.recipe) and found.step >= train.steps:
        more = "train.minutes, or give train.steps," if train.minutes else "train.steps"
        say(f"{folder.path} has reached step {found.step} of {train.steps}; raise {more} to continue.")
        return RunResult(folder.path, found.step)
    found = replace(found, lost=lost)
    return _train_through(loaded, run_plan, folder, store, found, began, watch, on_setup)


def _newest(loaded: Loaded, folder: RunFolder, store: CheckpointStore) -> tuple[Loaded, PlanFile | None, ResumePoint]:
    """The recipe with the steps and the plan of the folder's run, that plan, and the checkpoint to continue from."""
    run_plan, resuming = None, bool(store.paths())
    if resuming:
        loaded, run_plan = load_run_plan(loaded, folder.path)
    loaded = with_known_steps(loaded, folder.path, resuming=resuming)
    found = find(folder, store, loaded.recipe)
    return with_time_left(loaded, found.step, found.elapsed_s), run_plan, found


def _train_through(
    loaded: Loaded,
    run_plan: PlanFile | None,
    folder: RunFolder,
    store: CheckpointStore,
    found: ResumePoint,
    began: float,
    watch: RankWatch | None,
    on_setup: Callable[[RunContext], None] | None,
) -> RunResult:
    """Train. A step that cannot be undone sends the run back to its newest checkpoint, and is left out from then on.

    Raises:
        UnrecoverableStepError: the third one.
    """
    left_out: set[int] = set()
    world = World.alone() if watch is None else watch.world
    while True:
        try:
            return _train(loaded, run_plan, folder, store, found, began, watch, frozenset(left_out), on_setup)
        except UnrecoverableStepError as lost:
            left_out.add(lost.step)
            on_setup = None  # it has been told
            if len(left_out) >= MAX_BAD_STEPS:
                raise
        store.wait()
        loaded, run_plan, found = on_first(world, partial(_newest, loaded, folder, store))
        say(f"step {max(left_out) + 1} is left out; the run continues from step {found.step}")


def _train(
    loaded: Loaded,
    run_plan: PlanFile | None,
    folder: RunFolder,
    store: CheckpointStore,
    found: ResumePoint,
    began: float,
    watch: RankWatch | None,
    left_out: frozenset[int],
    on_setup: Callable[[RunContext], None] | None,
) -> RunResult:
    world = World.alone() if watch is None else watch.world
    with open_pulse() as pulse:
        setup = set_up(loaded, world=world, run_plan=run_plan, resuming=found.checkpoint is not None, at=pulse.at)
        if on_setup is not None:
            on_setup(setup)
        store.background = setup.recipe.checkpoint.async_save  # a plan may have changed it
        if is_open(setup.recipe):
            times = _timed(setup, folder, store, found, watch, left_out, pulse)
            if isinstance(times, str):
                say(f"{times} while steps were timed: nothing was to be saved, the same command starts again")
                return RunResult(folder.path, found.step, stopped=times)
            many = partial(steps_within, setup.recipe, times, done=found.step, elapsed_s=found.elapsed_s)
            setup = setup.lasting(on_first(world, many))
            found = found.at_length(setup.recipe, times.spent_s)
        with _assembled(setup, folder, store, found, watch, left_out, pulse) as run:
            run.begin(began)
            with StopRequest() as stop, nullcontext() if watch is None else watch.blaming():
                return run.train(stop)


def _timed(
    setup: RunContext,
    folder: RunFolder,
    store: CheckpointStore,
    found: ResumePoint,
    watch: RankWatch | None,
    left_out: frozenset[int],
    pulse: Pulse,
) -> StepTimes | str:
    """What the next steps take, by steps that are thrown away; the reason where a stop is asked for meanwhile."""
    say(f"train.minutes = {setup.recipe.train.minutes:g}: the first steps are timed, then the run begins")
    far_off = setup.lasting(Length(LONG, "", "", {}))
    blaming = nullcontext if watch is None else watch.blaming
    assembled = _assembled(far_off, folder, store, found, watch, left_out, pulse, shown=False)
    with assembled as run, StopRequest() as stop, blaming():
        pulse.at("timing steps, the first of which compiles")
        times = time_steps(run, stop)
    del run
    gc.collect()  # the model that steps were timed with goes before the next one is made
    trim_malloc()
    return times


@contextmanager
def _assembled(
    setup: RunContext,
    folder: RunFolder,
    store: CheckpointStore,
    found: ResumePoint,
    watch: RankWatch | None,
    left_out: frozenset[int],
    pulse: Pulse,
    *,
    shown: bool = True,
) -> Iterator[Run]:
    """The run at the step that it continues from, closed at the end.

    Args:
        shown: False: nothing of it is shown or written.
    """
    world = World.alone() if watch is None else watch.world
    recipe, follows = setup.recipe, not world.is_first or not shown
    sinks = open_sinks(() if follows else recipe.log.sinks, folder.path, recipe.model_dump(mode="json"))
    pulse.at("making the model")
    world.begin("making the model")
    parts = build(setup, fresh=found.checkpoint is None)
    resumed_step = None if found.checkpoint is None else found.step
    log = RunLog(folder.path, resumed_step=resumed_step, elapsed_s=found.elapsed_s, follows=follows)
    recorder = MetricsLogger(
        log,
        open_progress(pulse, follows=follows) if shown else NoProgress(),
        sinks,
        steps=recipe.train.steps,
        memory_limit=setup.memory_limit,
        scaled=parts.scaler is not None,
    )
    try:
        for text, numbers in setup.planned.events:
            recorder.event(found.step, "plan", text, **numbers)
        world.at("reference")
        pulse.at("")  # it has a bar of its own
        attach_reference(recipe, setup.prepared, setup.device, lambda: _starting(setup, parts, found), world)
        pulse.at("loading the checkpoint" if found.checkpoint is not None else "starting")
        world.at("restore")
        restore(found, parts, recorder)
        world.wait_for_all()
        if shown:
            _write_facts(folder, setup, parts)
        resumed = found.checkpoint is not None
        agreement = None if watch is None else watch.agreement(folder, setup.plan, parts.memory_tracker, recorder)
        if watch is not None and not shown:
            watch.recorder = None  # what it sees is to be seen
        replanner = replanner_for(setup, parts, recorder, agreement=agreement)
        yield Run(
            setup, parts, parts.state(), store, folder, recorder, replanner,
            resumed=resumed, agreement=agreement, left_out=left_out,
        )  # fmt: skip
    finally:
        parts.close()
        if watch is not None:
            watch.recorder = None
        recorder.close()


@contextmanager
def _starting(setup: RunContext, parts: Components, found: ResumePoint) -> Iterator[Model]:
    """The model with the weights that training begins with: of a run that resumes, one beside its own."""
    if found.checkpoint is None:
        yield parts.model
        return
    first = build(setup, fresh=True)
    try:
        yield first.model
    finally:
        first.close()


def _write_facts(folder: RunFolder, setup: RunContext, parts: Components) -> None:
    """Everything about the run that is known before its first step; the first of several ranks writes it."""

    def write() -> None:
        write_run_toml(setup.loaded, folder.recipe)
        more = {"kernels": setup.kernels.explain(), "matmul_switches": switches()}
        folder.write_json("machine.json", setup.machine.to_json() | more)
        folder.write_json("plan.json", setup.plan.to_json())
        setup.planned.write(folder.path)
        folder.write_json("data.json", {"fingerprint": setup.prepared.fingerprint, **setup.prepared.summary})
        folder.write_json("precision.json", parts.modes.rows())

    on_first(setup.world, write)
    setup.save_tokenizer(folder.path)
    folder.link_latest()

"""Two real steps on real data, and what they took beside what the plan said. Keeps nothing."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tilewright.core.config.load import Loaded
from tilewright.core.log import say
from tilewright.core.units import format_bytes, format_seconds
from tilewright.data.batches.microbatches import row_length
from tilewright.memory.tracking.tracker import OWNERS
from tilewright.parallel.world import World
from tilewright.planner.plan import Plan
from tilewright.training.assemble import HookFactory, build, set_up
from tilewright.training.components.reference_logprobs import attach_reference
from tilewright.training.components.run_samples import longest_document
from tilewright.training.executor.base import ExecutorKind
from tilewright.training.hooks.step_hook import Step
from tilewright.training.planning.minutes import LONG, Length, is_open
from tilewright.training.planning.rank_watch import watched
from tilewright.training.runlog.record_files import RunLog
from tilewright.training.runlog.recorder import MetricsLogger
from tilewright.training.runlog.run_folder import RunFolder
from tilewright.training.runlog.train_progress import TrainProgress

NUM_STEPS = 2
COUNTED = ("parameters", "optimizer", "gradients", "buffers")
"""Owners whose bytes a plan knows where it knows nothing else."""
UNKNOWN = "not known"


def dry_run(
    loaded: Loaded,
    world: World = World.alone(),  # noqa: B008 (frozen)
    hooks: Sequence[HookFactory] = (),
    executor: ExecutorKind | None = None,
) -> int:
    """Run a recipe's first steps as a dry run, and print the plan beside what is measured; returns the number of steps.
    Of several ranks, the first one prints.

    Raises:
        FitError: the plan says that the run does not fit, and the recipe enforces it.
        UnknownFitError: the plan does not know, and the recipe has a memory budget that it enforces.
    """
    with watched(world, Path(loaded.recipe.run.dir)) as watching:
        return _dry_run(loaded, watching, hooks, executor)


def _dry_run(loaded: Loaded, world: World, hooks: Sequence[HookFactory], executor: ExecutorKind | None) -> int:
    setup = set_up(loaded, world=world, executor=executor)
    minutes = setup.recipe.train.minutes if is_open(setup.recipe) else 0.0
    if minutes:
        setup = setup.lasting(Length(LONG, "", "", {}))
    world.begin("making the model")
    parts, folder = build(setup, fresh=True), RunFolder(Path(os.devnull), follows=True)
    log = RunLog(folder.path, follows=True)
    recorder = MetricsLogger(log, TrainProgress(), (), steps=NUM_STEPS, memory_limit=setup.memory_limit, scaled=False)
    if world.heartbeat is not None:
        parts.memory_tracker.on_phase = world.heartbeat.phase
    try:
        for data in (setup.prepared, setup.other):
            attach_reference(setup.recipe, data, setup.device, lambda: nullcontext(parts.model), world)
        parts.hooks += tuple(make(setup, parts) for make in hooks)
        # A step as `Run` makes it: batches, hooks, executor, hooks.
        for number in range(1, NUM_STEPS + 1):
            world.begin(f"data of step {number}")
            started = time.perf_counter()
            batches, lr = parts.stream.next_step(), parts.schedule.lr_at(number - 1)
            length = row_length(batches, longest_document(setup.recipe))
            step = Step(number, batches, lr, length, parts.stream.wait_s, False, recorder, folder)
            for hook in parts.hooks:
                step = hook.before_step(step)
            result = parts.executor.step(step.microbatches, step.lr)
            for hook in parts.hooks:
                hook.after_step(step, result)
            compiled = " (compiles)" if number == 1 and setup.compiles else ""
            say(f"step {number}: loss {result.loss:.4f}, {format_seconds(time.perf_counter() - started)}{compiled}")
        memory = parts.memory_tracker.snapshot(parts.model, parts.optimizer)
    finally:
        parts.close()
        recorder.close()
    # Planned beside measured.
    for line in comparison(setup.plan, memory, result.seconds):
        say(line)
    if minutes:
        say(f"train.minutes = {minutes:g}: about {int(60 * minutes / result.seconds):,} steps at the measured rate")
    for note in parts.model.notes:
        say(f"note: {note}")
    return NUM_STEPS


def comparison(plan: Plan, memory: Mapping[str, Any], step_s: float) -> list[str]:
    """Compare a dry run with its plan: bytes by owner at the peak, the peak, and the seconds of a step."""
    planned = plan.tracked[plan.tracked_phase]
    rows = [(owner, planned.get(owner, 0), memory["owners"][owner]) for owner in OWNERS]
    rows.append(("peak", plan.tracked_bytes(plan.tracked_phase), memory["peak_bytes"]))
    lines = [f"{'':<12} {'planned':>11} {'measured':>11}"]
    for name, expected, found in rows:
        known = not plan.shape.unknown or name in COUNTED
        lines.append(f"{name:<12} {format_bytes(expected) if known else UNKNOWN:>11} {format_bytes(found):>11}")
    seconds = UNKNOWN if plan.shape.unknown else format_seconds(plan.step_s)
    lines.append(f"{'step':<12} {seconds:>11} {format_seconds(step_s):>11}")
    return [*lines, plan.verdict] if plan.shape.unknown else lines

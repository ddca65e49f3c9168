"""Seconds of a run beside the plan's: how long it will take, before it starts; steps that are far off, early."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import Machine
from tilewright.core.units import format_seconds
from tilewright.planner.cost.mode_speed import slow_mode_notes
from tilewright.planner.machine.ceilings import Ceilings
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.base import Step, StepHook
from tilewright.training.planning.minutes import long_run
from tilewright.training.planning.off_plan import OFF, off_plan

COUNTED = 4
"""Steps of a process that are held against the plan: the first one, which compiles, and three more."""


def told_before(
    recipe: Recipe, done: int, step_s: float, rates: Ceilings, machine: Machine
) -> Iterator[tuple[str, str]]:
    """Remarks on a run before it starts, as (kind of event, text): that it will take long, that its mode is slower
    than fp32 on its machine.

    Args:
        recipe: its steps known.
        done: steps.
        step_s: planned seconds of a step; 0 where they are not known.
        rates, machine: where it runs.
    """
    if text := long_run(recipe.train, done, step_s):
        yield "long", text
    for text in slow_mode_notes(recipe, rates, machine):
        yield "slow_mode", text


def hold_against_plan(
    record_event: Callable[..., None], planned_s: float, seconds: Sequence[float], step: int, steps: int
) -> None:
    """Record where the first steps of a process are far off the plan.

    Args:
        record_event: step, kind, text, numbers.
        planned_s: seconds of a step; 0 where they are not known.
        seconds: of the first `COUNTED` steps in the mode that was planned. The first one compiles, and does not count.
        step: steps done.
        steps: of the run.
    """
    found, left = median(seconds[1:]), steps - step
    if not planned_s or off_plan(planned_s, found) < OFF:
        return
    text = f"steps take {format_seconds(found)}, {found / planned_s:.2g} times the planned {format_seconds(planned_s)}"
    text += f": the {left:,} that are left take {format_seconds(left * found)}"
    if found > planned_s:
        text += ". Other programs, or a format that this machine is slow in (tilewright doctor), may be the cause"
    record_event(step, "pace", text, planned_s=planned_s, measured_s=found, threshold=OFF)


class Pace(StepHook):
    """Says where steps are far off the plan, once.

    Args:
        planned_s: seconds of a step; 0 where they are not known.
        first: step, counted from 1, from which on the process runs what was planned.
        steps: of the run.
    """

    def __init__(self, planned_s: float, first: float, steps: int) -> None:
        self._planned_s, self._steps = planned_s, steps
        self.next_step = first + COUNTED - 1

    def after_step(self, step: Step, result: StepResult) -> None:
        """Compare the step and those before it."""
        if step.number >= self.next_step:
            self.next_step = math.inf
            seconds = list(step.recorder.log.recent_s)[-COUNTED:]
            hold_against_plan(step.recorder.event, self._planned_s, seconds, step.number, self._steps)

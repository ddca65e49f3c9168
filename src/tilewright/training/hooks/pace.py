"""Seconds of the first steps of a process, held against the plan."""

import math

from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.base import Step, StepHook
from tilewright.training.planning.pace import COUNTED, hold_against_plan


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

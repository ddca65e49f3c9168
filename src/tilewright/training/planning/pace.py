"""Seconds of a run beside the plan's: how long it will take, before it starts; steps that are far off, early."""

from collections.abc import Callable
from statistics import median

from tilewright.core.config.recipe import TrainSection
from tilewright.core.units import format_seconds

OFF = 1.5
"""Measured over planned seconds, or planned over measured, from which on a plan was wrong."""
LONG_S = 900.0
"""Seconds of a run that its user is told of before it starts."""
_COUNTED = 3
"""Steps after the first, which compiles, whose middle one is held against the plan."""


def off_plan(planned_s: float, measured_s: float) -> float:
    """How many times longer than planned a step takes, or how many times shorter.

    Example:
        >>> off_plan(6.5, 13.0), off_plan(6.0, 1.5)
        (2.0, 4.0)
    """
    return max(measured_s / planned_s, planned_s / measured_s)


def long_run(train: TrainSection, done: int, step_s: float) -> str:
    """What is said of a run that will take long, with what to do about it; empty where it will not.

    Args:
        train: of the recipe, its steps known. A run that was given in minutes takes what was asked for.
        done: steps.
        step_s: planned seconds of a step.
    """
    left = train.steps - done
    if train.minutes or left * step_s <= LONG_S:
        return ""
    return (
        f"{left:,} steps of about {format_seconds(step_s)} take {format_seconds(left * step_s)} as planned. Ctrl-C "
        f"saves and stops, the same command goes on from there; --train.minutes {LONG_S / 60:g} trains for so long"
    )


class Pace:
    """Holds the first steps of a process against the plan, and says once where they are far off.

    Args:
        planned_s: seconds of a step; 0 where they are not known.
        steps: of the run.
        record_event: records an event: step, kind, text, numbers.
    """

    def __init__(self, planned_s: float, steps: int, record_event: Callable[..., None]) -> None:
        self._planned_s = planned_s
        self._steps = steps
        self._record_event = record_event
        self._seconds: list[float] = []

    def after_step(self, step: int, seconds: float) -> None:
        """Count a step in the mode that was planned.

        Args:
            step: steps done.
            seconds: that the last one took.
        """
        if not self._planned_s or len(self._seconds) > _COUNTED:
            return
        self._seconds.append(seconds)
        if len(self._seconds) <= _COUNTED:
            return
        found = median(self._seconds[1:])
        if off_plan(self._planned_s, found) < OFF:
            return
        left = self._steps - step
        text = f"steps take {format_seconds(found)}, {found / self._planned_s:.2g} times the planned "
        text += f"{format_seconds(self._planned_s)}: the {left:,} that are left take {format_seconds(left * found)}"
        if found > self._planned_s:
            text += ". Other programs, or a format that this machine is slow in (tilewright doctor), may be the cause"
        self._record_event(step, "pace", text, planned_s=self._planned_s, measured_s=found, threshold=OFF)

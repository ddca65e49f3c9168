"""Which mode a step runs in: a start mode for the first part of a run, then the mode proper.

A pure function of the step, so a resumed run switches where an uninterrupted one does. Called by `training.loop`.
"""

from dataclasses import dataclass
from typing import Protocol


class ScheduleFields(Protocol):
    """The fields of the recipe's `[precision]` section read here."""

    @property
    def enabled(self) -> bool: ...

    @property
    def mode(self) -> str: ...

    @property
    def start_mode(self) -> str | None: ...

    @property
    def start_fraction(self) -> float: ...


@dataclass(frozen=True)
class ModeSchedule:
    """`start_mode` before step `switch_step`, `mode` from it on.

    Args:
        mode: the mode proper.
        start_mode: mode of the first steps; None for no switch.
        switch_step: first step (counted from 0) in `mode`.

    Example: TF32 for stability at first, BF16 after 20 % of the steps, as one of the articles advises.
        >>> schedule = ModeSchedule.over(1000, mode="bf16_mixed", start_mode="tf32", start_fraction=0.2)
        >>> schedule.at(199), schedule.at(200)
        ('tf32', 'bf16_mixed')
    """

    mode: str
    start_mode: str | None = None
    switch_step: int = 0

    @classmethod
    def over(cls, steps: int, *, mode: str, start_mode: str | None = None, start_fraction: float = 0.2):
        """The schedule of a run of `steps` steps. At least one step runs in each mode where there are two steps."""
        if start_mode is None:
            return cls(mode)
        return cls(mode, start_mode, min(max(round(start_fraction * steps), 1), max(steps - 1, 1)))

    @classmethod
    def from_section(cls, section: ScheduleFields, steps: int):
        """The schedule of a recipe's `[precision]` section. `enabled = false` is FP32 throughout."""
        if not section.enabled:
            return cls("fp32")
        return cls.over(steps, mode=section.mode, start_mode=section.start_mode, start_fraction=section.start_fraction)

    def at(self, step: int) -> str:
        """Mode of the step (counted from 0)."""
        return self.start_mode if self.start_mode is not None and step < self.switch_step else self.mode

"""The precision mode of a run, step by step: which one a step belongs to, and the switch to it."""

import math
from dataclasses import dataclass
from typing import Any

from tilewright.models.base.protocols import Model
from tilewright.precision.convert import set_mode
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.schedule import ModeSchedule
from tilewright.training.hooks.base import Step, StepHook


@dataclass
class PrecisionModes(StepHook):
    """The precision of the run, step by step: enters the mode that a step belongs to."""

    model: Model
    policy: Policy
    schedule: ModeSchedule
    mode: str
    needs_loss_scaling: bool
    """True where one of the run's modes passes gradients through FP16."""
    weights: QuantizedWeights | None
    """Codes of the weights of layers with 8-bit matmuls, made once a step. Of weights that do not stay on the device,
    and where they are sharded (None), the codes are made in each pass."""
    next_step: float = 0
    """The next switch; infinite after the last one."""

    def before_step(self, step: Step) -> Step:
        """Enter the mode of the step; a switch is recorded."""
        if (switched := self.enter(step.number - 1)) is not None:
            step.recorder.event(step.number, "precision_switch", switched)
            step.folder.write_json("precision.json", self.rows())
        return step

    def last_from(self, step: int) -> int:
        """The step, counted from 1, from which on a run that begins with `step` is in its last mode."""
        switch = self.schedule.next_switch(step - 1)
        return step if switch == math.inf else int(switch) + 1

    def enter(self, step: int) -> str | None:
        """Switch to the mode of `step` (counted from 0) where it is another one; a sentence on the switch."""
        mode, self.next_step = self.schedule.at(step), self.schedule.next_switch(step) + 1
        if mode == self.mode:
            return None
        before, self.mode = self.mode, mode
        set_mode(self.model, self.policy.in_mode(mode))
        self.refresh()
        return f"{before} -> {mode} from step {step + 1} on"

    def refresh(self) -> None:
        """Make the codes of the weights as they are now."""
        if self.weights is not None:
            self.weights.refresh()

    def rows(self) -> list[dict[str, Any]]:
        """The precision table of the present mode, for precision.json."""
        return self.model.precision_report.rows.to_json()

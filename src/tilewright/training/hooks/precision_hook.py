"""Work around each step for its precision: the mode that the step belongs to; for the precision controller
formats, samples, the learning rate, the record.

`precision.convert` and `precision.controller.precision_controller` do the work; here they meet batches of a run and its
files.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from tilewright.core.config.recipe import Recipe
from tilewright.core.units import format_share
from tilewright.data.batches.microbatches import Batch, count_targets, first_rows, to_device
from tilewright.models.base.protocols import Model, TrainableModel
from tilewright.parallel.parallelize import backward_of
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.groups import GemmSite, Move
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.convert import set_mode
from tilewright.precision.float8.weight_cache import QuantizedWeights
from tilewright.precision.policy.policy import Policy
from tilewright.precision.policy.precision_report import ConversionReport
from tilewright.precision.policy.schedule import FormatSchedule, ModeSchedule, lr_factor
from tilewright.training.executor.base import StepResult
from tilewright.training.hooks.step_hook import Step, StepHook
from tilewright.training.runlog.recorder import MetricsLogger

_SHOWN = 3
"""Moves of one sample that an event spells out; precision.jsonl has all of them."""


@dataclass
class PrecisionHook(StepHook):
    """The controller in a run.

    Args:
        control: of the run's model.
        model: gives the loss of a batch.
        device: where batches are moved.
        lr_noise: strength of the learning rate's answer to noise, see `schedule.lr_factor`.
    """

    control: PrecisionController
    model: TrainableModel
    device: torch.device
    lr_noise_damping: float = 0.0
    _microbatches: Sequence[Batch] = field(default=(), repr=False)
    name, repeatable = "control", True

    def before_step(self, step: Step) -> Step:
        """Set the formats of a step before it begins, sample evidence where it is due, and lower the learning rate by
        the measured noise."""
        number, schedule, self._microbatches = step.number - 1, self.control.schedule, step.microbatches
        floors, before = dict(schedule.floors(number)), self.control.controller.formats()
        self.control.enter(number)
        moved = self.control.controller.formats() != before  # on any rank
        if moved and number and floors != schedule.floors(number - 1):
            held = [name for name, floor in floors.items() if floor] or ["none"]
            text = f"matmuls kept in BF16 by schedule: {', '.join(held)}"
            step.recorder.event(step.number, "precision_switch", text)
        if self.control.due(number):
            whole = self.control.recalibrates(number)
            self._look(number, step.microbatches if whole else one_row(step.microbatches), step.recorder)
        return replace(step, lr=step.lr * lr_factor(self.control.controller.noise, self.lr_noise_damping))

    def after_step(self, step: Step, result: StepResult) -> None:
        """Sample evidence after a step on the batch of a step that wider formats have mended, without a teacher's
        additions."""
        if self.control.controller.suspect is not None:
            self._look(step.number - 1, self._microbatches, step.recorder)

    def state_dict(self) -> dict[str, Any]:
        """The state of the precision's hook for a checkpoint: see `PrecisionController`."""
        return self.control.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the precision's hook: see `PrecisionController`."""
        self.control.load_state_dict(state)

    def _look(self, step: int, microbatches: Sequence[Batch], recorder: MetricsLogger) -> None:
        self.control.sample(step, [self._pass(batch) for batch in microbatches])
        rows = self.control.take_rows()
        for row in rows:
            recorder.log.precision(**row)
        for kind, event, words in (
            ("move", "precision_move", "moved"),
            ("refused", "precision_budget", "wanted to move, but the budget does not allow it"),
        ):
            moves = [_move(row) for row in rows if row["kind"] == kind]
            if kind == "refused":
                moves = [move for move in moves if f"{move.layer} {move.gemm}" not in self.control.told]
                self.control.told |= {f"{move.layer} {move.gemm}" for move in moves}  # said once
            if moves:
                share = self.control.controller.share_above_8bit
                shown = "; ".join(map(str, moves[:_SHOWN]))
                more = f"; and {len(moves) - _SHOWN} more" if len(moves) > _SHOWN else ""
                text = f"{len(moves)} matmuls {words}: {shown}{more}; {format_share(share)} of the work is above 8 bits"
                recorder.event(step + 1, event, text, count=len(moves), above_8bit=share)

    def _pass(self, host_batch: Batch) -> Callable[[], None]:
        """A pass for a sample of the precision's hook, over the batch's own mean loss, so that it is the same wherever
        its rows are computed."""

        def run() -> None:
            batch = to_device(host_batch, self.device)
            backward_of(self.model, batch, max(count_targets([host_batch]), 1))

        return run


def one_row(microbatches: Sequence[Batch]) -> list[Batch]:
    """The first row of the first micro-batch, for a sample of the precision's hook."""
    return [first_rows(batch, 1) for batch in microbatches[:1]]


def _move(row: dict) -> Move:
    return Move(**{name: value for name, value in row.items() if name != "kind"})


def precision_hook(
    recipe: Recipe,
    model: Model,
    device: torch.device,
    everyone: dist.ProcessGroup | None = None,
    sites: Sequence[GemmSite] | None = None,
) -> PrecisionHook | None:
    """Make the hook that controls the precision of single matmuls; None if the recipe asks for neither it nor a
    schedule of them.

    Args:
        recipe: reads `[precision]` and the number of steps.
        model: converted.
        device: where batches are moved.
        everyone: all ranks, which decide alike; None on one rank.
        sites: matmuls of the whole model, where this rank has some of its layers; None: those of `model`.

    Raises:
        FitError: its budget cannot be kept.
    """
    section = recipe.precision
    if not section.moves_matmuls:
        return None
    control = section.controller
    settings = ControllerSettings(**control.model_dump(exclude={"enabled"})) if control.enabled else None
    schedule = FormatSchedule.from_section(section, recipe.train.steps)
    controller = PrecisionController(model, settings, schedule, group=everyone, sites=sites)
    return PrecisionHook(controller, model, device, section.lr_noise_damping)


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
    whole: Mapping[str, ConversionReport] = field(default_factory=dict)
    """Of the whole model by mode, where this rank has some of its layers."""
    next_step: float = 0
    """The next switch; infinite after the last one."""

    def before_step(self, step: Step) -> Step:
        """Enter the precision mode of the step; a switch is recorded."""
        if (switched := self.enter(step.number - 1)) is not None:
            step.recorder.event(step.number, "precision_switch", switched)
            step.folder.write_json("precision.json", self.rows())
        return step

    def last_from(self, step: int) -> int:
        """The step, counted from 1, from which on a run that begins with `step` is in its last precision mode."""
        switch = self.schedule.next_switch(step - 1)
        return step if switch == math.inf else int(switch) + 1

    def enter(self, step: int) -> str | None:
        """Switch to the precision mode of `step` (counted from 0) where it is another one; a sentence on the switch."""
        mode, self.next_step = self.schedule.at(step), self.schedule.next_switch(step) + 1
        if mode == self.mode:
            return None
        before, self.mode = self.mode, mode
        report = set_mode(self.model, self.policy.in_mode(mode))
        self.model.precision_report = self.whole.get(mode, report)
        self.refresh()
        return f"{before} -> {mode} from step {step + 1} on"

    def refresh(self) -> None:
        """Quantise the weights that the precision mode keeps as FP8 codes again, from their present values."""
        if self.weights is not None:
            self.weights.refresh()

    def rows(self) -> list[dict[str, Any]]:
        """The precision table of the present mode, for the hook's precision.json."""
        return self.model.precision_report.rows.to_json()

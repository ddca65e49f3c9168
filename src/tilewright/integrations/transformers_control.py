"""The precision controller inside the Hugging Face Trainer: a callback. Made by `integrations.transformers.attach`.

The Trainer owns its steps, so two things are other than in a run of tilewright's: samples are taken from the passes
that train, not from extra ones, and a bad step cannot be computed again. It is dropped, and the next one is looked at.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from tilewright.core.json_text import to_json
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.layer_statistics import QuantStats
from tilewright.precision.controller.precision_controller import PrecisionController, grad_norm
from tilewright.precision.controller.thresholds import Threshold
from tilewright.precision.snapshot import ModuleSnapshot


class ControllerCallback(TrainerCallback, ExportableState):
    """Moves matmuls between formats while a Trainer trains, drops bad steps, and writes precision.jsonl.

    Its state is in the Trainer's checkpoints; with `restore_callback_states_from_checkpoint=True` a resumed training
    continues with it. `precision.history.read_history(output_dir)` reads what it wrote.

    Args:
        settings: as JSON types, see `ControllerSettings`.
    """

    def __init__(self, settings: dict[str, Any] | None = None):
        self.settings = settings or asdict(ControllerSettings())
        self.saved: dict[str, Any] | None = None
        """State of a checkpoint, until training begins."""
        self.control: PrecisionController | None = None
        self.dropped = 0
        """Steps whose gradients were not used."""
        self._watching = ExitStack()
        self._evidence: Callable[[], QuantStats] | None = None
        self._before: ModuleSnapshot | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Attach the precision controller when transformers' Trainer begins: its model exists now."""
        thresholds = {name: Threshold(**each) for name, each in self.settings["thresholds"].items()}
        settings = ControllerSettings(**{**self.settings, "thresholds": thresholds})
        group = dist.group.WORLD if args.world_size > 1 else None  # the Trainer's own
        self.control = PrecisionController(kwargs["model"], settings, group=group)
        if self.saved is not None:
            self.control.load_state_dict(self.saved)
        folder = Path(str(args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        table = kwargs["model"].precision_report.rows.to_json()
        (folder / "precision.json").write_text(to_json(table, indent=1, default=str))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Set the controller's formats when transformers' Trainer begins a step, and hooks if that step is observed."""
        ours = self._control()
        self._before = ModuleSnapshot(ours.model)
        ours.enter(state.global_step)
        if ours.due(state.global_step) or ours.controller.suspect is not None:
            self._evidence = self._watching.enter_context(ours.monitor.watching())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ):
        """Judge the gradients before transformers' Trainer calls its optimizer, and drop those of a bad step."""
        ours = self._control()
        if self._evidence is not None:
            evidence, self._evidence = self._evidence(), None
            self._watching.close()
            ours.decide(state.global_step, evidence)
        # The loss is not told here, and the norm is that after the Trainer's clipping.
        if ours.check(0.0, grad_norm(ours.model)) is not None:
            self.dropped += 1
            for param in ours.model.parameters():
                param.grad = None  # optimizers leave such parameters as they are
            if self._before is not None:
                self._before.restore()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Record the controller's moves when transformers' Trainer ends a step."""
        rows = self._control().take_rows()
        if rows:
            with Path(str(args.output_dir), "precision.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(to_json(row) + "\n" for row in rows)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Add the share of work above 8 bits and the dropped steps to what transformers' Trainer logs."""
        if self.control is not None and state.log_history:
            share = self.control.controller.share_above_8bit
            state.log_history[-1] |= {"above_8bit": share, "dropped_steps": self.dropped}

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Remove the controller's hooks when transformers' Trainer ends within a step."""
        self._watching.close()

    def state(self) -> dict[str, Any]:
        """The controller's state, for checkpoints of transformers' Trainer."""
        saved = self.saved if self.control is None else self.control.state_dict()
        return {"args": {"settings": self.settings}, "attributes": {"saved": saved, "dropped": self.dropped}}

    def _control(self) -> PrecisionController:
        if self.control is None:
            raise AssertionError("the Trainer calls on_train_begin first")
        return self.control

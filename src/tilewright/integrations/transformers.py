"""tilewright's precision inside the Hugging Face Trainer: one call before `trainer.train()`.

The Trainer keeps its loop, data, logging and checkpoints. Its own `bf16` and `fp16` stay off, because two tools cannot
decide one thing.
"""

import inspect
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, cast

from torch import nn
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from tilewright.core.errors import ConfigError
from tilewright.core.log import say
from tilewright.integrations.accelerate import AcceleratorScaler, convert_for
from tilewright.integrations.transformers_control import ControllerCallback
from tilewright.optim.adam import DeepSeekAdam
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.convert import evaluating, set_mode
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.policy.policy import Policy, as_policy
from tilewright.precision.policy.precision_report import ConversionReport
from tilewright.precision.policy.schedule import ModeSchedule


def attach(
    trainer: Trainer,
    policy: Policy | str,
    *,
    start_mode: str | None = None,
    start_fraction: float = 0.2,
    eval_fp32: bool = True,
    scaler: DynamicScaler | None = None,
    control: ControllerSettings | None = None,
) -> ConversionReport:
    """Attach a precision policy to the Hugging Face Trainer: its model computes by it for all of its training.

    Args:
        trainer: made with neither `bf16` nor `fp16`, and not yet training.
        policy: a policy, or the name of a mode.
        start_mode: mode of the first `start_fraction` of the steps, for example "tf32".
        start_fraction: read where `start_mode` is given.
        eval_fp32: evaluate in FP32 during training. (For `trainer.evaluate()` on its own: inside
            `with tilewright.evaluating(model)`.)
        scaler: loss scaling to use; None makes one where the policy has FP16 gradients. Its scale and its skipped
            steps are then in the Trainer's logs.
        control: moves matmuls between FP8, BF16 and FP32 on evidence, decided so; "fp8_tile" only. See
            `transformers_control`.

    Raises:
        ConfigError: the Trainer's own mixed precision is on, it trains already, the mode stores FP16 parameters and the
            optimizer keeps no FP32 masters, or a controller has nothing to move.
        FitError: the controller's budget cannot be kept.

    See: docs/how-to/other-training-loops.md for a whole program.
    """
    policy = as_policy(policy)
    _check(trainer, policy)
    if (times := times_too_large(trainer)) > 1:
        say(
            f"note: the loss of {type(_bare_model(trainer)).__name__} is the mean of a micro-batch, and Trainer adds "
            f"{times} up as if each were divided by the step's tokens: loss and gradients are {times} times too large, "
            "with tilewright and without. trainer.model_accepts_loss_kwargs = False, before training, divides them",
            error=True,
        )
    if control is not None:
        policy = replace(policy, keep="value")
    model = cast(nn.Module, trainer.model)
    report = convert_for(trainer.accelerator, model, policy, scaler=scaler)
    callback = PrecisionCallback(report.policy.mode, start_mode, start_fraction, eval_fp32)
    if isinstance(trainer.accelerator.scaler, AcceleratorScaler):
        callback.scaler = trainer.accelerator.scaler.scaler
    trainer.add_callback(callback)
    if control is not None:
        PrecisionController(model, control)  # what cannot be is said now, not when training begins
        trainer.add_callback(ControllerCallback(asdict(control)))
    return report


def times_too_large(trainer: Trainer) -> int:
    """How many times too large the losses of transformers' Trainer are; 1: they are right, as far as can be seen.

    A model whose `forward` takes keywords gets the number of items of a step, and is trusted to divide its loss by it.
    Masked models such as BERT take all keywords and make a mean of their own, which Trainer then does not divide by the
    micro-batches of a step.
    """
    args = trainer.args
    own = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    if own or args.label_smoothing_factor or getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
        return 1  # what is not the model's loss
    if not trainer.model_accepts_loss_kwargs or not _makes_a_mean(_bare_model(trainer)):
        return 1
    ranks = trainer.accelerator.num_processes if args.average_tokens_across_devices else 1
    return args.gradient_accumulation_steps * ranks


def _bare_model(trainer: Trainer) -> nn.Module:
    """The model of transformers' Trainer without accelerate's wrappers and peft's."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _makes_a_mean(model: nn.Module) -> bool:
    """True if a model of transformers makes its loss in `forward` by torch's own, and not by its `loss_function`, which
    divides by the number of items that it is given."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names = {*code.co_names, *code.co_varnames} if code is not None else set()
    return any(name.endswith("Loss") for name in names) and not names & {"loss_function", "num_items_in_batch"}


class PrecisionCallback(TrainerCallback):
    """Switches the mode where the schedule says, evaluates in FP32, and logs the loss scale. Made by `attach`.

    Args:
        mode: the mode proper.
        start_mode: mode of the first part of the run, or None.
        start_fraction: length of that part.
        eval_fp32: evaluate in FP32.
    """

    def __init__(self, mode: str, start_mode: str | None = None, start_fraction: float = 0.2, eval_fp32: bool = True):
        self.mode, self.start_mode, self.start_fraction = mode, start_mode, start_fraction
        self.eval_fp32 = eval_fp32
        self.scaler: DynamicScaler | None = None
        self._schedule = ModeSchedule(mode)
        self._evaluation = ExitStack()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Set the precision schedule when transformers' Trainer begins: the number of steps is known now."""
        self._schedule = ModeSchedule.over(
            state.max_steps, mode=self.mode, start_mode=self.start_mode, start_fraction=self.start_fraction
        )
        if args.eval_on_start:
            self._begin_evaluation(kwargs["model"])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Switch the precision mode when transformers' Trainer begins a step that belongs to another one; also after a
        resume."""
        model, mode = kwargs["model"], self._schedule.at(state.global_step)
        if model.precision_report.policy.mode != mode:
            set_mode(model, mode)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Switch to the precision of evaluation when transformers' Trainer ends a step and evaluates next."""
        if control.should_evaluate:
            self._begin_evaluation(kwargs["model"])

    on_epoch_end = on_step_end

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Return to the precision of training when transformers' Trainer has evaluated."""
        self._evaluation.close()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        """Add the loss scale and the skipped steps to what transformers' Trainer logs."""
        if self.scaler is not None and state.log_history:
            state.log_history[-1] |= {"loss_scale": self.scaler.scale_value, "skipped_steps": self.scaler.skipped}

    def _begin_evaluation(self, model) -> None:
        self._evaluation.close()
        if self.eval_fp32:
            self._evaluation.enter_context(evaluating(model))


def _check(trainer: Trainer, policy: Policy) -> None:
    args = trainer.args
    on = [name for name in ("bf16", "fp16") if getattr(args, name)]
    if on:
        raise ConfigError(
            "Trainer's own mixed precision is on",
            got=f"TrainingArguments({on[0]}=True)",
            need="bf16=False and fp16=False: tilewright decides on the formats",
            try_=f"leave {on[0]} out of the TrainingArguments",
        )
    optimizer = trainer.optimizer_cls_and_kwargs or (type(trainer.optimizer),)
    if policy.storage != "fp32" and not issubclass(optimizer[0], DeepSeekAdam):
        raise ConfigError(
            f"{policy.mode} stores parameters in {policy.storage}, and the Trainer's optimizer keeps no FP32 masters",
            got=args.optim if optimizer[0] is type(None) else optimizer[0].__name__,
            need="tilewright.DeepSeekAdam",
            try_='Trainer(..., optimizer_cls_and_kwargs=(tilewright.DeepSeekAdam, {"lr": 1e-4})), or "bf16_mixed"',
        )

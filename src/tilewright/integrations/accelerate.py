"""tilewright's precision inside Hugging Face accelerate: a conversion before `accelerator.prepare`.

accelerate keeps doing the loop's other work: devices, distribution, accumulation, clipping. Its own mixed precision
stays off, because two tools cannot decide one thing.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from tilewright.core.errors import ConfigError
from tilewright.optim.gradients import found_inf, gradient_values
from tilewright.precision.convert import convert
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.mixed.wrapper_errors import storage_refused
from tilewright.precision.policy.policy import Policy, as_policy
from tilewright.precision.policy.precision_report import ConversionReport
from tilewright.precision.snapshot import ModuleSnapshot

if TYPE_CHECKING:
    from accelerate import Accelerator


class AcceleratorScaler:
    """A `DynamicScaler` with the methods that accelerate calls on a GradScaler.

    Gradients are divided by the scale when they arrive, so that clipping and gradient accumulation see true gradients
    (accelerate calls `unscale_` for a precision of its own alone): by a hook on each parameter. Parameters that
    accelerate has put in their places, such as FSDP2's parts, get their gradients without hooks: theirs are divided at
    the end of the backward pass. What a skipped step left in the model's buffers is taken back. The hooks stay for the
    life of the model.

    Args:
        scaler: decides on the scale.
        model: its parameters' gradients are unscaled.
        optimizers: those that accelerate has prepared by the time it is called.
    """

    def __init__(
        self,
        scaler: DynamicScaler,
        model: nn.Module,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]] = tuple,
    ):
        self.scaler = scaler
        self._optimizers = optimizers
        self._hooked: dict[int, ref[Tensor]] = {}
        self._found_inf: Tensor | None = None
        self._before: ModuleSnapshot | None = None
        model.register_forward_pre_hook(self._note)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._unscale)
                self._hooked[id(parameter)] = ref(parameter)

    def _unscale(self, grad: Tensor) -> Tensor:
        return grad * self.scaler.inv_scale

    def _is_hooked(self, parameter: Tensor) -> bool:
        known = self._hooked.get(id(parameter))
        return known is not None and known() is parameter

    def _note(self, model: nn.Module, inputs: Any) -> None:
        """Note in accelerate's scaler that the first pass of a step begins."""
        if model.training and self._before is None:
            self._before = ModuleSnapshot(model)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, by accelerate's scaler."""
        scaled = self.scaler.scale(loss)
        scaled.register_hook(self._begin)
        return scaled

    def _begin(self, grad: Tensor) -> None:
        """Begin a backward pass of accelerate's scaler: scale the gradients of parameters without hooks, and undo it at
        its end."""
        if self._multiply(self.scaler.scale_value):
            _at_end_of_backward(lambda: _at_end_of_backward(self._end))  # the last: FSDP2's own comes before

    def _end(self) -> None:
        self._multiply(self.scaler.inv_scale)

    def _multiply(self, factor: float) -> bool:
        """Multiply in accelerate's scaler the gradients of the parameters without hooks; False where there are no such
        parameters."""
        entries = (entry for optimizer in self._optimizers() for entry in optimizer.param_groups)
        others = [param for entry in entries for param in entry["params"] if not self._is_hooked(param)]
        for values in gradient_values(others):
            torch._foreach_mul_(values, factor)
        return bool(others)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing at accelerate's `unscale_`: gradients arrive unscaled."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
        """Step by accelerate's scaler unless a gradient is not finite."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        bad = found_inf(params)
        self._found_inf = bad if self._found_inf is None else self._found_inf | bad
        if not bad:
            optimizer.step(closure)

    def update(self) -> None:
        """Move the scale of accelerate's scaler by what `step` found since the last update."""
        found, before = bool(self._found_inf), self._before
        self._found_inf = self._before = None
        if found and before is not None:
            before.restore()
        self.scaler.update(found)

    def get_scale(self) -> float:
        """The scale of accelerate's scaler."""
        return self.scaler.scale_value

    def state_dict(self) -> dict[str, Any]:
        """The state of accelerate's scaler, which it saves with the rest."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore accelerate's scaler from a saved state."""
        self.scaler.load_state_dict(state)

    _device = "cpu"

    def _lazy_init_scale_growth_tracker(self, device: Any) -> None:
        """accelerate asks a GradScaler for it as it loads a state under FSDP2; here there is nothing to make."""


def _at_end_of_backward(work: Callable[[], None]) -> None:
    """Call `work` when the running backward pass under accelerate has ended, after all that was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def convert_for(
    accelerator: "Accelerator", model: nn.Module, policy: Policy | str, *, scaler: DynamicScaler | None = None
) -> ConversionReport:
    """Convert a model that accelerate will train; call it before `accelerator.prepare`.

    Args:
        accelerator: with `mixed_precision="no"`.
        model: not yet prepared.
        policy: a policy, or the name of a mode.
        scaler: loss scaling to use; None makes one, from the parameter count, where the policy has FP16 gradients.

    Raises:
        ConfigError: accelerate's own mixed precision is on, it has prepared something already, or the policy stores
            parameters in 16 bits and several processes train: DDP and FSDP2 reduce gradients in that format.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = nn.Linear(4, 4)
        >>> report = convert_for(accelerator, model, "bf16_mixed")
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> accelerator.backward(model(torch.ones(1, 4)).sum()); optimizer.step(); report.rows[0].compute
        'bf16'
    """
    if accelerator.mixed_precision != "no":
        raise ConfigError(
            "Mixed precision of accelerate is on",
            got=f'mixed_precision="{accelerator.mixed_precision}"',
            need='mixed_precision="no": tilewright decides on the formats',
            try_='Accelerator(mixed_precision="no")',
        )
    if accelerator._models or accelerator._optimizers:
        raise ConfigError(
            "Model or optimizer was already prepared by accelerate",
            need="the conversion first",
            try_="call convert_for before accelerator.prepare",
        )
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if accelerator.use_distributed and trained and as_policy(policy).storage != "fp32":
        raise storage_refused(f"accelerate ({accelerator.distributed_type.value})")
    report = cast(ConversionReport, convert(model, policy).precision_report)
    if scaler is None and report.needs_loss_scaling:
        scaler = DynamicScaler(num_params=sum(parameter.numel() for parameter in model.parameters()))
    if scaler is not None:
        accelerator.scaler = AcceleratorScaler(scaler, model, lambda: accelerator._optimizers)
    return report

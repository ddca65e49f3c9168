"""Dynamic loss scaling, for gradients that pass through FP16.

The loss is multiplied by a scale so that small gradients survive FP16, the gradients are divided by it again. An
overflow skips the step and lowers the scale; a window of clean steps raises it. The decisions are those of
`torch.amp.GradScaler`; besides, this one has bounds, an initial value from the model's size, counts what it skips, and
agrees over ranks. BF16 and FP32 need none of it. Called by `training.step` and by plain loops.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.errors import NumericsError
from tilewright.optim.gradients import all_finite, gradient_values


class ScaleFields(Protocol):
    """The fields of the recipe's `[precision]` section read here."""

    loss_scale: str | float
    loss_scale_window: int
    loss_scale_min: float
    loss_scale_max: float


def initial_scale(num_params: int) -> float:
    """A first scale for a model of this size: the power of two nearest to the square root of its parameter count.

    A gradient of norm 1 spread evenly over P parameters has elements of P^-0.5; scaled by P^0.5 they are near 1, in the
    middle of FP16's range (6e-5 to 65504). 100 million parameters give 8192, the order of 1e4 that the article names.

    Example:
        >>> initial_scale(100_000_000), initial_scale(1000)
        (8192.0, 32.0)
    """
    return 2.0 ** round(0.5 * math.log2(max(num_params, 1)))


class DynamicScaler:
    """A loss scale that follows the gradients.

    Args:
        init_scale: first scale. None: from `num_params` by `initial_scale`, or 65536 without it, as torch has it.
        num_params: parameters of the model.
        window: clean steps in a row before the scale grows.
        growth: factor on growth.
        backoff: factor on overflow.
        min: smallest scale allowed.
        max: largest scale allowed.

    Raises:
        ValueError: settings that make no sense.

    Example:
        >>> scaler = DynamicScaler(init_scale=1024.0, window=2)
        >>> [scaler.update(overflow) for overflow in (True, False, False)], scaler.skipped
        ([512.0, 512.0, 1024.0], 1)

    A plain loop:
        >>> weight = torch.nn.Parameter(torch.ones(2)); optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer), weight.data
        (True, tensor([0.5000, 0.5000]))
    """

    def __init__(
        self,
        init_scale: float | None = None,
        num_params: int | None = None,
        *,
        window: int = 2000,
        growth: float = 2.0,
        backoff: float = 0.5,
        min: float = 1.0,
        max: float = 2.0**24,
    ):
        if init_scale is None:
            init_scale = 65536.0 if num_params is None else initial_scale(num_params)
            init_scale = sorted((min, init_scale, max))[1]
        if not (0 < min <= init_scale <= max and growth > 1 and 0 < backoff < 1 and window >= 1):
            raise ValueError(
                "need 0 < min <= init_scale <= max, growth > 1, 0 < backoff < 1 and window >= 1; "
                f"got {min=}, {init_scale=}, {max=}, {growth=}, {backoff=}, {window=}"
            )
        self.scale_value = float(init_scale)
        self.window, self.growth, self.backoff = window, growth, backoff
        self.min, self.max = float(min), float(max)
        self.skipped = 0
        """Steps skipped for an overflow."""
        self.steps = 0
        """Steps seen."""
        self._clean = 0

    @classmethod
    def from_section(cls, section: ScaleFields, *, fp16: bool, num_params: int) -> "DynamicScaler | None":
        """The scaler of a recipe's `[precision]` section, or None.

        Args:
            section: `core.config.PrecisionSection`.
            fp16: gradients pass through FP16 (`ConversionReport.needs_loss_scaling`). Read where the section says auto.
            num_params: parameters of the model.
        """
        if section.loss_scale == "off" or (section.loss_scale == "auto" and not fp16):
            return None
        return cls(
            None if section.loss_scale == "auto" else float(section.loss_scale),
            num_params,
            window=section.loss_scale_window,
            min=section.loss_scale_min,
            max=section.loss_scale_max,
        )

    @property
    def inv_scale(self) -> float:
        """What gradients are multiplied by to be true again."""
        return 1.0 / self.scale_value

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in FP32."""
        return loss.float() * self.scale_value

    def update(self, found_inf: Tensor | bool) -> float:
        """Count a step and move the scale; the step is to be skipped if `found_inf`.

        Args:
            found_inf: whether the step's gradients were not all finite. A tensor is read here: the one host
                synchronisation of a step.

        Returns:
            The new scale.

        Raises:
            NumericsError: an overflow at the smallest scale allowed.
        """
        self.steps += 1
        if bool(found_inf):
            self.skipped += 1
            self._clean = 0
            self._shrink()
            return self.scale_value
        self._clean += 1
        if self._clean == self.window:
            self._clean = 0
            self.scale_value = min(self.scale_value * self.growth, self.max)
        return self.scale_value

    def _shrink(self) -> None:
        smaller = self.scale_value * self.backoff
        if smaller < self.min:
            raise NumericsError(
                "The loss scale cannot fall any further.",
                got=f"gradients not finite at scale {self.scale_value:g}; {self.skipped} of {self.steps} steps skipped",
                need=f"a scale of at least {self.min:g} (precision.loss_scale_min) without overflow",
                try_='precision.mode = "bf16_mixed", which needs no scale, or a lower optim.lr',
            )
        self.scale_value = smaller

    # ---- plain loops ----

    def unscale_(self, params: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> Tensor:
        """Divide the gradients by the scale in place; True (a 0-dim tensor) where one was not finite."""
        params = list(params)
        bad = found_inf(params, group)
        grads = [param.grad for param in params if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, self.inv_scale)
        return bad

    def step(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> bool:
        """Unscale, step unless a gradient is not finite, and update the scale. False where the step was skipped.

        To clip in between, call `unscale_`, the clipping and `update` yourself: see docs/precision.md.
        """
        params = [param for entry in optimizer.param_groups for param in entry["params"]]
        bad = bool(self.unscale_(params, group))
        if not bad:
            optimizer.step()
        self.update(bad)
        return not bad

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped."""
        return {"scale": self.scale_value, "clean": self._clean, "skipped": self.skipped, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.scale_value, self._clean = float(state["scale"]), int(state["clean"])
        self.skipped, self.steps = int(state["skipped"]), int(state["steps"])


def found_inf(params: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> Tensor:
    """Whether a gradient holds an infinity or NaN: a 0-dim boolean tensor, without waiting for the device.

    Args:
        params: parameters; those without a gradient are left out.
        group: ranks that must agree, as those that hold shards of the same tensors must: True on all where it is on
            one.

    Example:
        >>> weight = nn.Parameter(torch.ones(2)); weight.grad = torch.tensor([1.0, float("inf")])
        >>> found_inf([weight])
        tensor(True)
    """
    params = list(params)
    finite = [all_finite(values) for values in gradient_values(params)]
    if finite:
        bad = ~torch.stack([flag.to(finite[0].device) for flag in finite]).all()
    else:
        bad = torch.zeros((), dtype=torch.bool, device=params[0].device if params else "cpu")
    if group is not None:
        count = bad.to(torch.float32)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        bad = count > 0
    return bad

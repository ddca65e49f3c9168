"""Dynamic loss scaling, for gradients that pass through FP16.

The loss is multiplied by a scale so that small gradients survive FP16, the gradients are divided by it again. An
overflow skips the step and lowers the scale; a window of clean steps raises it. The decisions are those of
`torch.amp.GradScaler`, and so is the division of labour: `scale`, `unscale_` and `step` for each optimizer, then one
`update`. Also, this one has bounds, an initial value from the model's size, counts what it skips, agrees over ranks,
takes back what a skipped step left in the model (`attempt`), and refuses calls out of order. BF16 and FP32 need none of
it.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.core.errors import NumericsError
from tilewright.precision.loss_scaling.optimizer_turns import Turns, misused
from tilewright.precision.snapshot import ModuleSnapshot


def initial_scale(num_params: int) -> float:
    """The initial loss scale for a model of this size: the power of two nearest to the square root of its parameter
    count.

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

    A plain loop; another optimizer has a `step` of its own before the one `update`:
        >>> weight = torch.nn.Parameter(torch.ones(2)); optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaler.scale(weight.sum()).backward()
        >>> scaler.step(optimizer), scaler.update(), weight.data
        (True, 1024.0, tensor([0.5000, 0.5000]))
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
        self._turns = Turns()

    @classmethod
    def from_section(cls, section: PrecisionSection, *, fp16: bool, num_params: int) -> "DynamicScaler | None":
        """The loss scaler of a recipe's `[precision]` section, or None.

        Args:
            section: of a recipe.
            fp16: gradients pass through FP16 (`ConversionReport.needs_loss_scaling`). Read where the section says auto.
            num_params: parameters of the model.
        """
        if not section.enabled or section.loss_scale == "off" or (section.loss_scale == "auto" and not fp16):
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
        """The inverse of the loss scale, with which gradients are unscaled."""
        return 1.0 / self.scale_value

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss, in FP32 or wider."""
        self._turns.scale()
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale_value

    def update(self, found_inf: Tensor | bool | None = None) -> float:
        """Count a step and move the loss scale, once all optimizers had their turn.

        Args:
            found_inf: whether a gradient was not finite, in loops that look for themselves. None: what `unscale_` and
                `step` found since the last update. Tensors are read here.

        Returns:
            The new scale.

        Raises:
            ConfigError: nothing was found since the last update, and nothing is given.
            NumericsError: an overflow at the smallest scale allowed.
        """
        seen = self._turns.overflow()
        if found_inf is None and seen is None:
            raise misused(
                "update", "no optimizer was unscaled or stepped since the last update", "step(optimizer), then update()"
            )
        before = self.scale_value
        try:
            self._move(bool(found_inf) or bool(seen))
        finally:
            self._turns.end(self.scale_value / before)
        return self.scale_value

    def _move(self, overflow: bool) -> None:
        self.steps += 1
        if overflow:
            self.skipped += 1
            self._clean = 0
            self._shrink()
            return
        self._clean += 1
        if self._clean == self.window:
            self._clean = 0
            self.scale_value = min(self.scale_value * self.growth, self.max)

    def _shrink(self) -> None:
        smaller = self.scale_value * self.backoff
        if smaller < self.min:
            raise NumericsError(
                "Loss scale reached its minimum",
                got=f"gradients not finite at scale {self.scale_value:g}; {self.skipped} of {self.steps} steps skipped",
                need=f"a scale of at least {self.min:g} (precision.loss_scale_min) without overflow",
                try_='precision.mode = "bf16_mixed", which needs no scale, or a lower optim.lr',
            )
        self.scale_value = smaller

    # ---- plain loops ----

    def unscale_(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> Tensor:
        """Divide an optimizer's gradients by the loss scale in place, to clip or look at them before `step`.

        Gradients that wait through several updates keep the right scale once their optimizer was unscaled or stepped
        for the first time: `update` multiplies them where it moves the scale.

        Args:
            optimizer: not unscaled since the last update. A parameter that it shares with one that was is not divided
                again.
            group: ranks that must agree, see `found_inf`.

        Returns:
            True where a gradient was not finite, a 0-dim tensor; no device is waited for.

        Raises:
            ConfigError: called out of order, a shared gradient has changed since, gradients of the last step are still
                there, or some are FP16.
        """
        return self._turns.unscale(optimizer, self.inv_scale, group)

    def step(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> bool:
        """Unscale the gradients where `unscale_` has not, and step the optimizer unless one is not finite. Then call
        `update`.

        Args:
            optimizer: one that was not stepped since the last update.
            group: ranks that must agree, see `found_inf`.

        Returns:
            False where the step was skipped.

        Raises:
            ConfigError: called out of order, or the optimizer needs a closure.
        """
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise misused(
                "step", f"{type(optimizer).__name__} computes gradients itself", "an optimizer without closure"
            )
        return self._turns.step(optimizer, self.inv_scale, group)

    @contextmanager
    def attempt(self, *models: nn.Module) -> Iterator[ModuleSnapshot]:
        """An attempt at one step under loss scaling, from its first forward pass to `update`, of models that this pass
        changes: running statistics of batch norm, say. Where an optimizer's step was skipped, their buffers are as
        before in the end.

        It costs a copy of the buffers. Gives what was noted: `restore` it where the loop skips a step for a reason of
        its own.

        Raises:
            ConfigError: `update` was not called inside.

        Example:
            >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
            >>> scaler, optimizer = DynamicScaler(4.0), torch.optim.SGD(model.parameters(), lr=0.1)
            >>> with scaler.attempt(model):
            ...     scaler.scale(model(torch.full((3, 2), torch.inf)).sum()).backward()
            ...     scaler.step(optimizer), scaler.update()
            (False, 2.0)
            >>> model[0].running_mean, model[0].num_batches_tracked
            (tensor([0., 0.]), tensor(0))
        """
        notes, steps, skipped = ModuleSnapshot(*models), self.steps, self.skipped
        try:
            yield notes
            if self.steps == steps:
                raise misused("attempt", "update was not called inside", "forward, backward, step and update() inside")
        finally:
            if self.skipped > skipped:
                notes.restore()

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale from which a resumed run continues as if it had not stopped."""
        return {"scale": self.scale_value, "clean": self._clean, "skipped": self.skipped, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale from `state_dict()`, between two steps."""
        self._turns = Turns()
        self.scale_value, self._clean = float(state["scale"]), int(state["clean"])
        self.skipped, self.steps = int(state["skipped"]), int(state["steps"])

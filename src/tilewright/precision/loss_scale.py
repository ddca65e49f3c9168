"""Dynamic loss scaling, for gradients that pass through FP16.

The loss is multiplied by a scale so that small gradients survive FP16, the gradients are divided by it again. An
overflow skips the step and lowers the scale; a window of clean steps raises it. The decisions are those of
`torch.amp.GradScaler`, and so is the division of labour: `scale`, `unscale_` and `step` for each optimizer, then one
`update`. Besides, this one has bounds, an initial value from the model's size, counts what it skips, agrees over ranks,
takes back what a skipped step left in the model (`attempt`), and refuses calls out of order. BF16 and FP32 need none of
it.
"""

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.core.errors import ConfigError, NumericsError
from tilewright.optim.gradients import all_finite, gradient_values, total_norm
from tilewright.precision.untouched import Notes


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
        self._begin()

    def _begin(self) -> None:
        self._scaled = False
        """A loss was scaled since the last update."""
        self._turns: dict[torch.optim.Optimizer, _Turn] = {}
        """Of optimizers since the last update."""
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        """Optimizers that ever had a turn."""
        self._true: dict[Tensor, _Version] = {}
        """Gradients that were divided by the scale since the last update, by parameter."""
        self._spent: dict[Tensor, ref[Tensor]] = {}
        """Gradients that were divided before that; what a backward pass adds to them has the scale."""

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which begins between two steps."""
        passing = ("_scaled", "_turns", "_seen", "_true", "_spent")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

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
        """The loss times the scale, in FP32 or wider."""
        self._scaled = True
        for turn in self._turns.values():
            turn.settle()
        self._forget_spent()
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.scale_value

    def update(self, found_inf: Tensor | bool | None = None) -> float:
        """Count a step and move the scale, once all optimizers had theirs.

        Args:
            found_inf: whether a gradient was not finite, in loops that look for themselves. None: what `unscale_` and
                `step` found since the last update. Tensors are read here.

        Returns:
            The new scale.

        Raises:
            ConfigError: nothing was found since the last update, and nothing is given.
            NumericsError: an overflow at the smallest scale allowed.
        """
        if found_inf is None and not self._turns:
            raise _misused(
                "update", "no optimizer was unscaled or stepped since the last update", "step(optimizer), then update()"
            )
        overflow = bool(found_inf) or any(bool(turn.found_inf) for turn in self._turns.values())
        before = self.scale_value
        try:
            self._move(overflow)
        finally:
            self._rescale(self.scale_value / before)
            self._spent |= {param: ref(version.grad) for param, version in self._true.items()}
            self._true, self._turns, self._scaled = {}, {}, False
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

    def _rescale(self, factor: float) -> None:
        """Give gradients that wait for a later turn the new scale, which the losses will have that add to them."""
        if factor == 1.0:
            return
        params = dict.fromkeys(param for optimizer in self._seen for param in _params_of(optimizer))
        waiting = [param for param in params if not (self._is_spent(param) or self._was_divided(param))]
        for values in gradient_values(waiting):
            torch._foreach_mul_(values, factor)

    def _is_spent(self, param: Tensor) -> bool:
        return param in self._spent and self._spent[param]() is param.grad

    def _was_divided(self, param: Tensor) -> bool:
        return param in self._true and self._true[param].grad is param.grad

    def _forget_spent(self) -> None:
        """Of former gradients, those that are None, replaced or zero now."""
        left = [param for param in self._spent if param.grad is not None and self._is_spent(param)]
        if total_norm(gradient_values(left)) == 0:  # what most have, so that the device is waited for once at most
            left = []
        self._spent = {param: self._spent[param] for param in left if total_norm(gradient_values([param])) != 0}

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

    def unscale_(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> Tensor:
        """Divide an optimizer's gradients by the scale in place, to clip or look at them before `step`.

        Gradients that wait through several updates keep the right scale once their optimizer was unscaled or stepped
        for the first time: `update` multiplies them where it moves the scale.

        Args:
            optimizer: not unscaled since the last update. A parameter that it shares with one that was is not divided
                again.
            group: ranks that must agree, see `found_inf`.

        Returns:
            True where a gradient was not finite, a 0-dim tensor; no device is waited for.

        Raises:
            ConfigError: called out of order, a shared gradient has changed since, or gradients of the last step are
                still there.
        """
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise _misused("unscale_", f"it was called with a {type(optimizer).__name__}", "an optimizer")
        if not self._scaled:
            raise _misused("step", "no loss was scaled since the last update", "scale(loss).backward()")
        if optimizer in self._turns:
            done = "stepped" if self._turns[optimizer].stepped else "unscaled"
            raise _misused("unscale_", f"the optimizer was {done} already", "unscale_, step, then update()")
        params = _params_of(optimizer)
        spent = [param for param in params if param.grad is not None and self._is_spent(param)]
        if spent:
            raise _misused(
                "unscale_",
                f"{len(spent)} gradients still hold what they held before the last update, divided by the scale",
                "optimizer.zero_grad() before the next loss is scaled",
            )
        still = [param for param in params if param.grad is not None and not self._is_true(param)]
        bad = found_inf(params, group)
        for values in gradient_values(still):
            torch._foreach_mul_(values, self.inv_scale)
        self._true.update((param, _Version.of(param)) for param in still)
        self._turns[optimizer] = _Turn(params, bad)
        self._seen[optimizer] = None
        return bad

    def _is_true(self, param: Tensor) -> bool:
        """Whether a gradient was divided by the scale already, with another optimizer that has the parameter too."""
        if param not in self._true:
            return False
        if self._true[param].is_that_of(param):
            return True
        raise _misused(
            "unscale_",
            f"a parameter of shape {tuple(param.shape)} is in two optimizers; its gradient has changed since it was\n"
            "unscaled with the first one",
            "unscale_ of both optimizers before gradients are clipped or computed, or an update() between them",
        )

    def step(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None) -> bool:
        """Unscale the gradients where `unscale_` has not, and step unless one is not finite. Then call `update`.

        Args:
            optimizer: one that was not stepped since the last update.
            group: ranks that must agree, see `found_inf`.

        Returns:
            False where the step was skipped.

        Raises:
            ConfigError: called out of order, or the optimizer needs a closure.
        """
        turn = self._turns.get(optimizer)
        if turn is not None and turn.stepped:
            raise _misused("step", "the optimizer was stepped already", "an update() after the steps of all optimizers")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise _misused(
                "step", f"{type(optimizer).__name__} computes gradients itself", "an optimizer without closure"
            )
        if turn is None:
            self.unscale_(optimizer, group)
            turn = self._turns[optimizer]
        elif not turn.is_settled():
            raise _misused(
                "step",
                "gradients have changed since another loss was scaled, after they were unscaled",
                "unscale_ after the last backward(), or the step before the next loss is scaled",
            )
        good = not bool(turn.found_inf)
        if good:
            optimizer.step()
        turn.stepped = True
        return good

    @contextmanager
    def attempt(self, *models: nn.Module) -> Iterator[Notes]:
        """Around one step, from its first forward pass to `update`, of models that this pass changes: running
        statistics of batch norm, say. Where an optimizer's step was skipped, their buffers are as before in the end.

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
        notes, steps, skipped = Notes(*models), self.steps, self.skipped
        try:
            yield notes
            if self.steps == steps:
                raise _misused("attempt", "update was not called inside", "forward, backward, step and update() inside")
        finally:
            if self.skipped > skipped:
                notes.restore()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had not stopped."""
        return {"scale": self.scale_value, "clean": self._clean, "skipped": self.skipped, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`, between two steps."""
        self._begin()
        self.scale_value, self._clean = float(state["scale"]), int(state["clean"])
        self.skipped, self.steps = int(state["skipped"]), int(state["steps"])


@dataclass(frozen=True)
class _Version:
    """A gradient as it was at some time. Writes that torch does not see (`grad.data`) are not seen here."""

    grad: Tensor | None
    number: int = -1

    @classmethod
    def of(cls, param: Tensor) -> "_Version":
        return cls(param.grad, -1 if param.grad is None else param.grad._version)

    def is_that_of(self, param: Tensor) -> bool:
        now = _Version.of(param)
        return self.grad is now.grad and self.number == now.number


@dataclass
class _Turn:
    """What was done with an optimizer since the last update."""

    params: list[Tensor]
    found_inf: Tensor
    stepped: bool = False
    settled: dict[Tensor, _Version] | None = None
    """True gradients as they were when the next loss was scaled: whatever its backward pass adds has the scale."""

    def settle(self) -> None:
        """Another loss was scaled."""
        if not self.stepped and self.settled is None:
            self.settled = {param: _Version.of(param) for param in self.params}

    def is_settled(self) -> bool:
        """Whether no other loss was scaled, or none changed these gradients."""
        return self.settled is None or all(version.is_that_of(param) for param, version in self.settled.items())


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(dict.fromkeys(param for entry in optimizer.param_groups for param in entry["params"]))


def _misused(method: str, got: str, need: str) -> ConfigError:
    return ConfigError(
        f"DynamicScaler.{method} out of order",
        got=got,
        need=need,
        try_="for each loss: scale(loss).backward(); for each optimizer: step(optimizer); then once: update()",
    )


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

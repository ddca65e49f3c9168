"""Whose gradients are divided by the loss scale, in loops with any number of optimizers. Part of `loss_scale`.

Between two updates of the scale each optimizer has one turn: its gradients are divided by the scale, and it steps. A
gradient holds what losses with the present scale have put there, or true values since its turn. Both in one sum would
be a wrong number, so that is refused. Writes that torch does not see (`grad.data`) are not seen here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.optim.gradients import any_not_finite, gradient_values


@dataclass(frozen=True, slots=True)
class _Version:
    """A parameter's gradient as it was at some time."""

    param: Tensor
    grad: Tensor | None
    number: int

    @classmethod
    def of(cls, param: Tensor) -> "_Version":
        grad = param.grad
        return cls(param, grad, -1 if grad is None else grad._version)

    def is_now(self) -> bool:
        grad = self.param.grad
        return grad is self.grad and (grad is None or grad._version == self.number)


@dataclass
class _Turn:
    """Steps of an optimizer since the last update."""

    params: list[Tensor]
    found_inf: Tensor
    stepped: bool = False
    settled: list[_Version] | None = None
    """True gradients as they were when the next loss was scaled: whatever its backward pass adds has the scale."""

    def is_settled(self) -> bool:
        """True where an optimizer's turn is settled: no other loss was scaled, or none changed these gradients."""
        return self.settled is None or all(version.is_now() for version in self.settled)


@dataclass(frozen=True, slots=True)
class _Spent:
    """A gradient that was unscaled before the last update: true values, until it is set to None or to zero."""

    param: Tensor
    grad: ref[Tensor]
    least: Tensor | None = None
    """The least norm that it had when a loss was scaled since then, on its device."""

    def is_left(self) -> bool:
        """True where a parameter still has the gradient of an optimizer's turn."""
        return self.param.grad is not None and self.grad() is self.param.grad

    def looked_at(self) -> "_Spent":
        """The gradient of an optimizer's turn after a look at its norm, which no device is waited for."""
        ((value,),) = gradient_values([self.param])
        norm = torch.linalg.vector_norm(value)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return _Spent(self.param, self.grad, norm if self.least is None else torch.minimum(self.least, norm))


class Turns:
    """Events of losses, optimizers and gradients since the last update."""

    def __init__(self) -> None:
        self._scaled = False
        self._turns: dict[torch.optim.Optimizer, _Turn] = {}
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
        """Optimizers that ever had a turn."""
        self._true: dict[int, _Version] = {}
        """Gradients that were divided since the last update, by the id of their parameter."""
        self._spent: dict[int, _Spent] = {}
        """Gradients that were divided before that."""

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        """Copies of optimizers' turns begin between two updates."""
        return Turns, ()

    def scale(self) -> None:
        """Scale a loss before the optimizers' turns; backward passes follow."""
        self._scaled = True
        for turn in self._turns.values():
            if not turn.stepped and turn.settled is None:
                turn.settled = [_Version.of(param) for param in turn.params]
        self._spent = {key: spent.looked_at() for key, spent in self._spent.items() if spent.is_left()}

    def unscale(self, optimizer: torch.optim.Optimizer, inv_scale: float, group: dist.ProcessGroup | None) -> Tensor:
        """Unscale the gradients of an optimizer in its turn: see `DynamicScaler.unscale_`."""
        # 1. Calls in another order would divide twice, or not at all.
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise misused("unscale_", f"it was called with a {type(optimizer).__name__}", "an optimizer")
        if not self._scaled:
            raise misused("step", "no loss was scaled since the last update", "scale(loss).backward()")
        if optimizer in self._turns:
            done = "stepped" if self._turns[optimizer].stepped else "unscaled"
            raise misused("unscale_", f"the optimizer was {done} already", "unscale_, step, then update()")
        # 2. A gradient that still holds divided values would get scaled ones on top: a wrong sum.
        params = _params_of([optimizer])
        spent = self._still_spent(params)
        if spent:
            raise misused(
                "unscale_",
                f"{len(spent)} gradients still hold what they held before the last update, divided by the scale",
                "optimizer.zero_grad() before the next loss is scaled",
            )
        # 3. Parameters of several optimizers are divided once.
        still = [param for param in params if not self._is_true(param)] if self._true else params
        values_of_all = gradient_values(params)
        if any(value.dtype == torch.float16 for values in values_of_all for value in values):
            raise ConfigError(
                "FP16 gradients cannot be unscaled in place",
                got="parameters with FP16 gradients: small ones would be lost in the division",
                need="FP32 gradients",
                try_='convert(model, "hybrid") or "pure_fp16", or param.grad_dtype = torch.float32 for each parameter',
            )
        # All its gradients decide whether an optimizer steps, those that another one has divided too.
        bad = any_not_finite(values_of_all, params[0].device if params else torch.device("cpu"), group)
        for values in values_of_all if still is params else gradient_values(still):
            torch._foreach_mul_(values, inv_scale)
        self._true |= {id(param): _Version.of(param) for param in still}
        self._turns[optimizer] = _Turn(params, bad)
        self._seen[optimizer] = None
        return bad

    def step(self, optimizer: torch.optim.Optimizer, inv_scale: float, group: dist.ProcessGroup | None) -> bool:
        """Step an optimizer in its turn unless its gradients overflowed: see `DynamicScaler.step`."""
        turn = self._turns.get(optimizer)
        if turn is not None and turn.stepped:
            raise misused("step", "the optimizer was stepped already", "an update() after the steps of all optimizers")
        if turn is None:
            self.unscale(optimizer, inv_scale, group)
            turn = self._turns[optimizer]
        elif not turn.is_settled():
            raise misused(
                "step",
                "gradients have changed since another loss was scaled, after they were unscaled",
                "unscale_ after the last backward(), or the step before the next loss is scaled",
            )
        good = not bool(turn.found_inf)
        if good:
            optimizer.step()
        turn.stepped = True
        return good

    def overflow(self) -> bool | None:
        """True where a gradient was not finite in the optimizers' turns; None where no optimizer had one."""
        return any(bool(turn.found_inf) for turn in self._turns.values()) if self._turns else None

    def end(self, factor: float) -> None:
        """End the optimizers' turns: the scale was multiplied by this factor. Gradients that wait for a later turn get
        the new scale, which the losses will have that add to them."""
        if factor != 1.0:
            params = _params_of(self._seen)
            true = {id(param) for param in self._still_spent(params)}
            true |= {key for key, version in self._true.items() if version.grad is version.param.grad}
            for values in gradient_values(param for param in params if id(param) not in true):
                torch._foreach_mul_(values, factor)
        divided = ((key, version.param, version.grad) for key, version in self._true.items())
        self._spent |= {key: _Spent(param, ref(grad)) for key, param, grad in divided if grad is not None}
        self._true, self._turns, self._scaled = {}, {}, False

    def _is_true(self, param: Tensor) -> bool:
        """True where a gradient was divided already in the turn of another optimizer that has the parameter too."""
        version = self._true.get(id(param))
        if version is None or (version.grad is None and param.grad is None):
            return False
        if version.is_now():
            return True
        raise misused(
            "unscale_",
            f"a parameter of shape {tuple(param.shape)} is in two optimizers; its gradient has changed since it was\n"
            "unscaled with the first one",
            "unscale_ of both optimizers before gradients are clipped or computed, or an update() between them",
        )

    def _still_spent(self, params: list[Tensor]) -> list[Tensor]:
        """Gradients that an earlier turn has unscaled: they hold true values from before the last update."""
        if not self._spent:
            return []
        left = [spent for param in params if (spent := self._spent.get(id(param))) is not None and spent.is_left()]
        norms = [torch.ones(()) if spent.least is None else spent.least for spent in left]
        nonzero = torch.stack([norm.to(norms[0].device) for norm in norms]).ne(0).tolist() if norms else []
        return [spent.param for spent, holds in zip(left, nonzero, strict=True) if holds]


def misused(method: str, got: str, need: str) -> ConfigError:
    """The error of an optimizer's turn out of order."""
    return ConfigError(
        f"DynamicScaler.{method} out of order",
        got=got,
        need=need,
        try_="for each loss: scale(loss).backward(); for each optimizer: step(optimizer); then once: update()",
    )


def _params_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    entries = (entry for optimizer in optimizers for entry in optimizer.param_groups)
    return list({id(param): param for entry in entries for param in entry["params"]}.values())

"""Inputs of linear layers while text goes through a model: X^T X, mean magnitude, range, and which norm made it.

Legend: M tokens  K in features.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.core.errors import NumericsError
from tilewright.models.base.eval_mode import evaluation

Batch = Mapping[str, Tensor]


@dataclass
class InputStats:
    """Inputs of one linear layer so far. A layer that saw none has zeros."""

    hessian_KK: Tensor
    sum_K: Tensor
    num_tokens: int = 0
    low: float = 0.0
    high: float = 0.0
    norm: nn.Module | None = None
    """The norm whose output is the input, as it is."""

    @property
    def mean_K(self) -> Tensor:
        """The mean magnitude of each input channel over the calibration rows."""
        return self.sum_K / max(self.num_tokens, 1)

    def add(self, x: Tensor) -> None:
        """Add inputs [..., K] to the statistics of a calibration."""
        x_MK = x.detach().reshape(-1, x.shape[-1]).double()
        if x_MK.numel():
            self.hessian_KK += x_MK.T @ x_MK
            self.sum_K += x_MK.abs().sum(0)
            self.num_tokens += x_MK.shape[0]
            self.low, self.high = min(self.low, float(x_MK.min())), max(self.high, float(x_MK.max()))


@dataclass
class _Pass:
    made: dict[int, tuple[Tensor, nn.Module]] = field(default_factory=dict)

    def norm(self, module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            self.made[id(out)] = (out, module)  # kept alive, so that the id stays its own

    def linear(self, stats: InputStats, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        made = self.made.get(id(x))
        stats.norm = None if made is None else made[1]
        stats.add(x)


class _Reached(Exception):
    """A pass has come to the module that it was to stop before."""


@torch.no_grad()
def run_in_turn(model: Any, stages: Sequence[nn.Module], batch: Batch) -> bool:
    """True if a pass runs each of `stages` once, in this order, and none is part of another: calibrating a later stage
    then changes nothing before it."""
    parts = [part for stage in stages for part in stage.modules()]
    if len(set(parts)) < len(parts):
        return False
    ran: list[nn.Module] = []
    handles = [stage.register_forward_pre_hook(lambda module, args: ran.append(module)) for stage in stages]
    try:
        with evaluation(model):
            model.loss(batch)  # in its first pass a Hugging Face model checks how it reads packed documents
            ran.clear()
            model.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    return ran == list(stages)


@torch.no_grad()
def observe(
    model: Any, layers: Mapping[str, nn.Linear], batches: Sequence[Batch], *, stop_before: nn.Module | None = None
) -> dict[str, InputStats]:
    """Observe the inputs of some linear layers of a model with `loss(batch)`: the statistics for calibration.

    Args:
        model: as for `quantize`.
        layers: by name.
        batches: text that goes through the model.
        stop_before: a module that runs after all of `layers`; what is behind it is not computed.

    Raises:
        NumericsError: an input is not finite.
    """
    stats = {
        name: InputStats(
            torch.zeros((layer.in_features, layer.in_features), dtype=torch.float64),
            torch.zeros(layer.in_features, dtype=torch.float64),
        )
        for name, layer in layers.items()
    }
    with evaluation(model):
        for batch in batches:
            seen = _Pass()
            with _hooks(model, layers, stats, seen, stop_before), contextlib.suppress(_Reached):
                model.loss(batch)
    for name, one in stats.items():
        if not bool(torch.isfinite(one.sum_K).all()):
            raise NumericsError(
                "Inputs of a linear layer are not finite",
                got="infinite or NaN values while calibration text goes through the model",
                need="finite activations",
                try_="an earlier checkpoint of the run",
                where=name,
            )
    return stats


@contextmanager
def _hooks(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    stats: Mapping[str, InputStats],
    seen: _Pass,
    stop_before: nn.Module | None,
) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(partial(seen.linear, stats[name])) for name, layer in layers.items()]
    handles += [module.register_forward_hook(seen.norm) for module in model.modules() if is_norm(module)]
    if stop_before is not None:
        handles.append(stop_before.register_forward_pre_hook(_stop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stop(module: nn.Module, args: Any) -> None:
    raise _Reached


def is_norm(module: nn.Module) -> bool:
    """True if a module is a norm for calibration: without children, its parameters vectors."""
    parameters = list(module.parameters(recurse=False))
    leaf = next(module.children(), None) is None
    return leaf and bool(parameters) and all(parameter.ndim == 1 for parameter in parameters)

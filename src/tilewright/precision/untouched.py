"""A pass through a model that leaves nothing behind: gradients, buffers, generators and what modules note on the side.

For passes that are looked at and not trained on (`monitor`), and for steps that are skipped or computed again.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.precision.fp8_linear import Fp8Linear
from tilewright.precision.own_weights import counters
from tilewright.precision.tile_linear import TileLinear

_TORCHS = ("_is_full_backward_hook", "_compiled_call_impl")
"""Attributes of every module that no pass changes."""

Slot = tuple[dict[str, Any], str]
"""A dictionary of a module, and a name in it."""


class Slots:
    """Where the modules of models hold what a pass changes besides gradients; they are looked through once.

    Linear layers with 8-bit weights are left out: a pass changes nothing there but the counts of what was executed.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.buffers: list[Slot] = []
        self.attributes: list[Slot] = []
        self._counted: list[nn.Module] = []
        self._counters = [count for model in models for count in counters(model)]
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, TileLinear | Fp8Linear):
                self._counted.append(module)
                continue
            self.buffers += [(module._buffers, name) for name in module._buffers]
            held = vars(module)
            names = [name for name, value in held.items() if value is None or isinstance(value, Tensor)]
            self.attributes += [(held, name) for name in names if name not in _TORCHS]

    @property
    def counts(self) -> list[Tensor]:
        """The counts of what was executed."""
        found = [vars(module).get("counts") for module in self._counted]
        return [count for count in (*found, *self._counters) if count is not None]


class Notes:
    """What the modules of some models hold besides parameters, as it was when this was made: buffers, and tensors noted
    as attributes.

    Args:
        models: modules.
        slots: theirs, if they were looked through before.

    Example: a step is not taken, and the running mean does not know of it.
        >>> norm = nn.BatchNorm1d(2)
        >>> notes = Notes(norm)
        >>> out = norm(torch.full((3, 2), torch.inf)); norm.running_mean
        tensor([inf, inf])
        >>> notes.restore(); norm.running_mean
        tensor([0., 0.])
    """

    @torch.no_grad()
    def __init__(self, *models: nn.Module, slots: Slots | None = None) -> None:
        slots = slots or Slots(*models)
        self._attributes = [(held, name, held.get(name)) for held, name in slots.attributes]
        self._buffers = [(held, name, held.get(name)) for held, name in slots.buffers]
        self._values = [None if buffer is None else buffer.clone() for _, _, buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put it back: the same tensors with the same values, where a pass wrote into them or put others there."""
        for held, name, value in (*self._attributes, *self._buffers):
            held[name] = value
        for (_, _, buffer), value in zip(self._buffers, self._values, strict=True):
            if buffer is not None:
                buffer.copy_(value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, gradients start empty; afterwards model, gradients and generators are what they were."""
    notes = Notes(model)
    grads = [(param, param.grad) for param in model.parameters()]
    layers = [layer.counts for layer in model.modules() if hasattr(layer, "counts")]
    counts = [(count, count.clone()) for count in (*layers, *counters(model))]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad
        for count, value in counts:
            count.copy_(value)
        notes.restore()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

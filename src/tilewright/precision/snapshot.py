"""State that a pass changes in addition to gradients, as it was: buffers, what modules note on the side, counts and
generators.

For passes that are looked at and not trained on (`monitor`), for steps that are skipped or computed again, and for
layers that are computed a second time with the same random numbers. Random states have one form, that of checkpoints:
torch's as uint8 tensors by device ("cpu", "cuda.0"), Python's and numpy's in JSON types.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.third_party import counters

_TORCHS = ("_is_full_backward_hook", "_compiled_call_impl")
"""Attributes of every module that no pass changes."""

Slot = tuple[dict[str, Any], str]
"""A dictionary of a module, and a name in it."""


class ModuleSlots:
    """Where the modules of models hold what a pass changes in addition to gradients; they are looked through once.

    Linear layers with 8-bit weights are left out: a pass changes nothing there but the counts of what was executed.
    """

    def __init__(self, *models: nn.Module) -> None:
        self.buffers: list[Slot] = []
        self.attributes: list[Slot] = []
        self._counted: list[nn.Module] = []
        self._counters = [count for model in models for count in counters(model)]
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, Float8Linear | FrozenFloat8Linear):
                self._counted.append(module)
                continue
            self.buffers += [(module._buffers, name) for name in module._buffers]
            held = vars(module)
            names = [name for name, value in held.items() if value is None or isinstance(value, Tensor)]
            self.attributes += [(held, name) for name in names if name not in _TORCHS]

    @property
    def counts(self) -> list[Tensor]:
        """Counts of executed matmuls that a module's snapshot restores."""
        found = [vars(module).get("counts") for module in self._counted]
        return [count for count in (*found, *self._counters) if count is not None]


class ModuleSnapshot:
    """Buffers and notes of the modules of some models, as they were when this was made: buffers, and tensors noted
    as attributes.

    Args:
        models: modules.
        slots: theirs, if they were looked through before.

    Example: a step is not taken, and the running mean does not know of it.
        >>> norm = nn.BatchNorm1d(2)
        >>> notes = ModuleSnapshot(norm)
        >>> out = norm(torch.full((3, 2), torch.inf)); norm.running_mean
        tensor([inf, inf])
        >>> notes.restore(); norm.running_mean
        tensor([0., 0.])
    """

    @torch.no_grad()
    def __init__(self, *models: nn.Module, slots: ModuleSlots | None = None) -> None:
        slots = slots or ModuleSlots(*models)
        self._attributes = [(held, name, held.get(name)) for held, name in slots.attributes]
        self._buffers = [(held, name, held.get(name)) for held, name in slots.buffers]
        self._values = [None if buffer is None else buffer.clone() for _, _, buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore a module from its snapshot: the same tensors with the same values, where a pass wrote into them or
        put others there."""
        for held, name, value in (*self._attributes, *self._buffers):
            held[name] = value
        for (_, _, buffer), value in zip(self._buffers, self._values, strict=True):
            if buffer is not None:
                buffer.copy_(value)


class Snapshot:
    """Notes, counts of what was executed, and the generators' states, as they were when this was made.

    Args:
        slots: of the models.
        device: whose generator the models draw from, in addition to those of the host; None for all GPUs in use.
    """

    def __init__(self, slots: ModuleSlots, device: torch.device | None = None) -> None:
        self.notes = ModuleSnapshot(slots=slots)
        self._counts = [(count, count.clone()) for count in slots.counts]
        self._torch, self._host = torch_states(device), host_states()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all of a snapshot."""
        self.notes.restore()
        for count, value in self._counts:
            count.copy_(value)
        set_torch_states(self._torch)
        set_host_states(self._host)


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Take a snapshot of a model around a pass: gradients start empty inside, and afterwards model, gradients and
    generators are what they were."""
    before = Snapshot(ModuleSlots(model))
    grads = [(param, param.grad) for param in model.parameters()]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad
        before.restore()


def torch_states(device: torch.device | None = None) -> dict[str, Tensor]:
    """The states of torch's generators by device: the CPU's and that of `device`; None for all GPUs in use."""
    gpus: list[int] = []
    if device is None and torch.cuda.is_initialized():
        gpus = list(range(torch.cuda.device_count()))
    elif device is not None and device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    return {name: _state(name) for name in ("cpu", *(f"cuda.{index}" for index in gpus))}


def set_torch_states(states: Mapping[str, Tensor]) -> None:
    """Set torch's generators from a snapshot; states of GPUs that are not there are left out."""
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state)
        elif (index := int(name.removeprefix("cuda."))) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, index)


def host_states() -> dict[str, list[Any]]:
    """Snapshot of the states of Python's and numpy's generators."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached)],
    }


def set_host_states(states: Mapping[str, list[Any]]) -> None:
    """Set Python's and numpy's generators from a snapshot."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


@contextmanager
def drawing(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, torch draws from a snapshot's states on; afterwards its generators are as they were. Nothing without
    states."""
    before = {name: _state(name) for name in states}
    set_torch_states(states)
    try:
        yield
    finally:
        set_torch_states(before)


def _state(name: str) -> Tensor:
    return torch.get_rng_state() if name == "cpu" else torch.cuda.get_rng_state(int(name.removeprefix("cuda.")))

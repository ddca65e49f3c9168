"""The same random numbers and the same choices of experts, when a layer is computed a second time.

    replay.record(key, layer, function)  # computes, and remembers what was drawn and chosen
    replay.replay(key, layer, function)  # computes with the same draws and choices; generators are left alone

Without it a dropout mask of the backward pass is another one than that of the forward pass, and a router whose scores
come out in another last bit (compiled otherwise, or from a rounded input) may send a token to another expert. Choices
of our own router are taken over where it makes them, those of Hugging Face layers at `torch.topk`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tilewright.models.base.routers import find_routers
from tilewright.models.decoder.moe import Router
from tilewright.precision.snapshot import drawing, set_torch_states, torch_states


class RouterChoices:
    """Index tensors in the order in which one call made them; called again, it gives them back instead."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._given: int | None = None

    def __call__(self, choose: Callable[[], Tensor]) -> Tensor:
        """Replay a router's choice: that of the first call of `choose`, for this and later calls."""
        if self._given is None:
            self._made.append(choose())
            return self._made[-1]
        self._given += 1
        return self._made[self._given - 1]

    def rewind(self) -> "RouterChoices":
        """Replay the recorded choices of routers from now on, from the first one on."""
        self._given = 0
        return self


@dataclass
class _Taken:
    """Random states and choices of one call. `states` are the generators' before it, empty where it drew nothing."""

    choices: RouterChoices = field(default_factory=RouterChoices)
    states: Mapping[str, Tensor] = field(default_factory=dict)


class Replay:
    """Replays calls of layers: keeps random draws and choices of experts by key until `clear`.

    Args:
        device: whose generator the layers draw from, in addition to that of the CPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._taken: dict[Hashable, _Taken] = {}
        self._routers: dict[nn.Module, tuple[list[Router], bool]] = {}

    def record(self, key: Hashable, layer: nn.Module | None, function: Callable[[], Any]) -> Any:
        """Record for a replay: run function(), with its random draws and expert choices kept under `key`; nothing where
        it fails."""
        taken, before = _Taken(), torch_states(self._device)
        try:
            with self._choosing(layer, taken.choices):
                out = function()
        except BaseException:
            set_torch_states(before)
            raise
        after = torch_states(self._device)
        if any(not torch.equal(state, after[name]) for name, state in before.items()):
            taken.states = before
        self._taken[key] = taken
        return out

    def replay(self, key: Hashable, layer: nn.Module | None, function: Callable[[], Any]) -> Any:
        """Replay function() with the random draws and expert choices that were recorded."""
        taken = self._taken[key]
        with drawing(taken.states), self._choosing(layer, taken.choices.rewind()):
            return function()

    def knows(self, key: Hashable) -> bool:
        """True where a call can be replayed: it is remembered under `key`."""
        return key in self._taken

    def clear(self) -> None:
        """Forget the draws and choices that `replay` uses, of all calls."""
        self._taken.clear()

    @contextmanager
    def _choosing(self, layer: nn.Module | None, choices: RouterChoices) -> Iterator[None]:
        own, foreign = self._routers_in(layer)
        for router in own:
            router.choices = choices
        try:
            if foreign:
                with TopKChoices(choices):
                    yield
            else:
                yield
        finally:
            for router in own:
                router.choices = None

    def _routers_in(self, layer: nn.Module | None) -> tuple[list[Router], bool]:
        """Routers of our own in a layer to replay, and whether there are others."""
        if layer is None:
            return [], False
        if layer not in self._routers:
            own = [module for module in layer.modules() if isinstance(module, Router)]
            self._routers[layer] = own, any(router not in own for router in find_routers(layer))
        return self._routers[layer]


class TopKChoices(TorchFunctionMode):
    """Takes the indices of `topk` from `choices`; the values are then those at these indices."""

    def __init__(self, choices: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        super().__init__()
        self._choices = choices

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        values = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        indices = self._choices(lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((values.gather(dim, indices), indices))

"""How a foreign model calls its layers: the tensors, which may be sent, apart from the rest, which is found again.

    layer_calls = LayerCalls()
    context = layer_calls.pack(calls)  # one call for each layer -> tensors by name
    layer_calls.call(3, context)  # the call of layer 3

What is no tensor (flags, None, how arguments are nested, autocast) is the same wherever the model's own forward runs on
the same batch, so a stage of a pipeline that makes the context itself has it too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_STYLE = "style"
"""Name of the number of what is no tensor."""


@dataclass
class LayerCall:
    """The arguments of a layer in addition to the stream, and the autocast around it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def seen(cls, slot: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "LayerCall":
        """A layer's call seen as it is made now, without its stream, which must not be kept alive.

        Args:
            slot: position or name of the stream.
            args, kwargs: with the stream.
        """
        device = next(tensors_of((args, kwargs))).device.type
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if isinstance(slot, int):
            return cls((*args[:slot], None, *args[slot + 1 :]), dict(kwargs), autocast)
        return cls(args, {key: value for key, value in kwargs.items() if key != slot}, autocast)

    def arguments(self, slot: int | str, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a layer's call with this stream."""
        if isinstance(slot, int):
            return (*self.args[:slot], x, *self.args[slot + 1 :]), self.kwargs
        return self.args, self.kwargs | {slot: x}


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands in a call."""

    name: str


@dataclass(frozen=True)
class _Style:
    """A call without its tensors."""

    leaves: tuple[Any, ...]
    nesting: TreeSpec
    autocast: tuple[bool, torch.dtype]


class LayerCalls:
    """The ways in which one model has called its layers so far."""

    def __init__(self) -> None:
        self._styles: list[tuple[_Style, ...]] = []

    def __len__(self) -> int:
        """Count the different ways in which layers are called: masks are there for some batches and not for others."""
        return len(self._styles)

    def pack(self, calls: Sequence[LayerCall]) -> dict[str, Tensor]:
        """Pack the arguments of the layers' calls: the tensors of all, each once, and a number for the rest."""
        names: dict[int, str] = {}
        found: dict[str, Tensor] = {}
        styles = []
        for call in calls:
            leaves, nesting = tree_flatten((call.args, call.kwargs))
            for tensor in leaves:
                if isinstance(tensor, Tensor):
                    name = names.setdefault(id(tensor), str(len(names)))
                    found[name] = tensor
            kept = tuple(_Place(names[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            styles.append(_Style(kept, nesting, call.autocast))
        if tuple(styles) not in self._styles:
            self._styles.append(tuple(styles))
        return found | {_STYLE: torch.tensor(self._styles.index(tuple(styles)))}

    def call(self, index: int, context: Mapping[str, Tensor]) -> LayerCall:
        """The call of a layer."""
        style = self._styles[int(context[_STYLE])][index]
        leaves = [context[leaf.name] if isinstance(leaf, _Place) else leaf for leaf in style.leaves]
        args, kwargs = tree_unflatten(leaves, style.nesting)
        return LayerCall(args, kwargs, style.autocast)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Tensors of a layer's call in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, dict):
        yield from tensors_of(list(tree.values()))

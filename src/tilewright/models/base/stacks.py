"""Layers of a model that we did not make: its list of layers, sorted by structure, and the model with fewer of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Stack:
    """A list of layers. `name`: of the list, in the model; `kinds`: layer numbers, those of equal structure together,
    in the order in which each kind comes first."""

    name: str
    kinds: tuple[tuple[int, ...], ...]

    @property
    def firsts(self) -> list[int]:
        """The first layers of a stack, one of each kind."""
        return [indices[0] for indices in self.kinds]


def find_stack(model: nn.Module) -> Stack | None:
    """Find the stack: the list of layers with the most parameters; None where a model has no list."""
    name, layers = max(
        ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)),
        key=lambda pair: sum(p.numel() for p in pair[1].parameters()),
        default=("", None),
    )
    if layers is None:
        return None
    kinds: dict[object, list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(_structure(layer), []).append(index)
    return Stack(name, tuple(tuple(found) for found in kinds.values()))


def _structure(layer: nn.Module) -> object:
    """The structure of a layer in a stack in which alike ones are equal: modules, shapes and settings, the layer's own
    number left out."""
    modules = []
    for name, module in layer.named_modules():
        tensors = tuple((n, tuple(t.shape), t.dtype) for n, t in module.named_parameters(recurse=False))
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (int, float, str, type(None))) and key not in ("layer_idx", "layer_id")
        )
        modules.append((name, type(module).__qualname__, tensors, plain))
    return tuple(modules)


def keep_layers(model: nn.Module, stack: Stack, kept: Sequence[int]) -> nn.ModuleList:
    """Keep some layers of a stack and remove all others from the model, in place; returns the list of all of them."""
    owner_name, _, name = stack.name.rpartition(".")
    owner = model.get_submodule(owner_name)
    layers = owner._modules[name]
    assert isinstance(layers, nn.ModuleList)
    owner._modules[name] = nn.ModuleList(layers[index] for index in kept)
    return layers


@contextmanager
def one_of_each_kind(model: nn.Module) -> Iterator[None]:
    """Inside, a model's stack has one layer of each kind; a model without a list of layers, all that it has.

    Example:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(5))})
        >>> with one_of_each_kind(model):
        ...     len(model["layers"])
        1
        >>> len(model["layers"])
        5
    """
    stack = find_stack(model)
    if stack is None:
        yield
        return
    layers = keep_layers(model, stack, stack.firsts)
    try:
        yield
    finally:
        owner, _, name = stack.name.rpartition(".")
        model.get_submodule(owner)._modules[name] = layers

"""Layers of a model that we did not make: its list of layers, sorted by structure, and models with fewer of them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tilewright.models.hf.model import HFModel


@dataclass(frozen=True)
class Stack:
    """A list of layers. `name`: of the list, in the model; `kinds`: layer numbers, those of equal structure together,
    in the order in which each kind comes first."""

    name: str
    kinds: tuple[tuple[int, ...], ...]

    def full_name(self, kept: Sequence[int], name: str) -> str:
        """The name that a module of a model of the layers `kept` has in the model of all layers.

        Example:
            >>> Stack("net.layers", ((0, 1, 2), (3,))).full_name([0, 3], "net.layers.1.mlp")
            'net.layers.3.mlp'
        """
        prefix = f"{self.name}."
        if not name.startswith(prefix):
            return name
        number, dot, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{kept[int(number)]}{dot}{rest}"


def find_stack(model: nn.Module) -> Stack | None:
    """The list of layers with the most parameters; None where a model has no list."""
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
    """The structure in which alike layers are equal: modules, shapes and settings, the layer's own number left out."""
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


def keep_layers(model: HFModel, stack: Stack, kept: Sequence[int]) -> HFModel:
    """Take all other layers out of the model, in place."""
    owner_name, _, name = stack.name.rpartition(".")
    owner = model.get_submodule(owner_name)
    layers = owner._modules[name]
    assert isinstance(layers, nn.ModuleList)
    owner._modules[name] = nn.ModuleList(layers[index] for index in kept)
    return model


def reduced(model: HFModel, stack: Stack, kept: Sequence[int]) -> HFModel:
    """A copy of the model with these layers alone."""
    return keep_layers(copy.deepcopy(model), stack, kept)

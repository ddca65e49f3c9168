"""A model with the values that an artefact stores, to compare the artefact with: what it then differs by is not
rounding.

The values are rounded here from the model's own parameters, before anything is renamed, reordered or packed.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.formats.integer import IntegerTensor, quantize_pairs
from tilewright.models.base.output_layers import find_heads
from tilewright.models.base.routers import find_routers

Stored = Callable[[str, nn.Module, Tensor], Tensor]
"""Name of a parameter (of tied ones the first), a module that it belongs to, its values -> the values stored for it."""


@torch.no_grad()
def with_stored(model: Any, stored: Stored) -> Any:
    """A copy of a model in FP32 whose parameters are the stored values that `stored` returns.

    Args:
        model: a module, left alone.
        stored: called for each module's parameter; tied parameters that it gives other values are untied.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> with_stored(layer, lambda name, module, values: torch.full_like(values, 3.0)).weight.tolist()
        [[3.0, 3.0]]
    """
    found = copy.deepcopy(model)
    names = {id(parameter): name for name, parameter in found.named_parameters()}
    changed: dict[int, list[nn.Parameter]] = {}
    for module in found.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = stored(names[id(parameter)], module, parameter.detach()).to(parameter.dtype)
            same = [other for other in changed.get(id(parameter), ()) if torch.equal(other, values)]
            new = same[0] if same else nn.Parameter(values, requires_grad=False)
            changed.setdefault(id(parameter), []).append(new)
            setattr(module, name, new)
    return found


def in_int8(model: Any) -> Any:
    """Copy a model with the values that INT8 stores: linear layers and the embedding with a scale per row, routers
    unchanged: see `onnx.int8_columns`."""
    routers = {id(module) for module in find_routers(model)}
    heads = {id(head.weight) for head in find_heads(model)}
    rows = max((len(head.weight) for head in find_heads(model)), default=0)

    def stored(_: str, module: nn.Module, values: Tensor) -> Tensor:
        table = isinstance(module, nn.Embedding) and (id(module.weight) in heads or len(values) == rows)
        linear = isinstance(module, nn.Linear) and values.ndim == 2 and id(module) not in routers
        return quantize_pairs(values).dequantize() if table or linear else values

    return with_stored(model, stored)


def in_codes(model: Any, codes: Mapping[str, IntegerTensor], rest: Stored) -> Any:
    """Copy a model with stored values: those of its codes where there are any, and `rest` elsewhere."""

    def stored(name: str, module: nn.Module, values: Tensor) -> Tensor:
        return codes[name].dequantize() if name in codes else rest(name, module, values)

    return with_stored(model, stored)

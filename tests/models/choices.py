"""Which weights' results a model chooses by, found by watching a forward pass: the truth that router rules are held to.

Every tensor carries the names of the weights that made it: a matmul with a weight gives its result that weight's name,
another matmul gives none, and all else hands names on. What arrives at a choice (topk, argmax, max along a dimension,
gather) is what decides it. Nothing here reads the structure of a module.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

PRODUCTS = {
    *(F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm),
    *(torch.bmm, Tensor.bmm, torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.einsum),
    *(F.conv1d, F.conv2d, F.scaled_dot_product_attention, F.grouped_mm),
}
CHOICES = {
    *(torch.topk, Tensor.topk, torch.argmax, Tensor.argmax, torch.max, Tensor.max, torch.gather, Tensor.gather),
}


class Choices(TorchFunctionMode):
    """Inside, collects in `found` the names of weights [M, K] whose results something is chosen among, of those `used`.

    A result counts where the choice is along the last dimension, and that is no longer than the M results.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.used: set[str] = set()
        self._results = {name: weight.shape[0] for name, weight in weights.items()}
        self._weights = {id(weight): frozenset([name]) for name, weight in weights.items()}
        """Names of the weights that a tensor is: the weight itself, casts and views of it."""
        self._made_by: dict[int, frozenset[str]] = {}
        self._kept: list[Tensor] = list(weights.values())  # an id is a name for as long as its tensor lives

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = list(_tensors((args, kwargs or {})))
        weights = _union(self._weights.get(id(tensor)) for tensor in given)
        made_by = _union(self._made_by.get(id(tensor)) for tensor in given)
        if func in CHOICES and given:
            self._note(given[0], made_by, args, kwargs or {})
        matmul = func in PRODUCTS or "grouped_mm" in str(func)
        self.used |= weights if matmul else frozenset()
        for tensor in _tensors(out):
            self._kept.append(tensor)
            if matmul:
                self._made_by[id(tensor)] = weights
            elif all(id(each) in self._weights for each in given):
                self._weights[id(tensor)] = weights
            else:
                self._made_by[id(tensor)] = made_by
        return out

    def _note(self, chosen: Tensor, names: frozenset[str], args: Any, kwargs: Mapping[str, Any]) -> None:
        numbers = [arg for arg in args[1:] if type(arg) is int]
        dim = kwargs.get("dim", numbers[-1] if numbers else None)
        if dim is None or dim % max(chosen.ndim, 1) != chosen.ndim - 1:
            return
        self.found |= {name for name in names if 1 < chosen.shape[dim] <= self._results[name]}


def _union(names: Iterator[frozenset[str] | None]) -> frozenset[str]:
    return frozenset().union(*(each for each in names if each))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)

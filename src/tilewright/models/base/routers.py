"""Where a model chooses, between experts most of all: found by structure and by what a module's code calls.

A module chooses if its code calls `topk` or the like, or if transformers records what it returns as router logits. Of
such a module a weight is a router's if its rows are what is chosen among: it has one for each of the experts beside it,
or it is the only weight there is, or the only one whose result no weight beside it reads. No example input is needed,
and no name of a class or an attribute is compared. A policy's rules name a router that this misses, and un-name one.
Read `find_routers` first, then `_Search.routers_of`.
"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from tilewright.models.base.class_code import called, called_by_functions, recorded_as
from tilewright.ops.base.code_modules import own_tensors

CHOOSING = frozenset({"topk", "argmax", "argsort", "multinomial"})
"""A mixture that calls one of these chooses."""
SELECTING = CHOOSING | {"max", "sort", "gather"}
"""A module of one weight that calls one of these, with as many rows as there are experts beside it, chooses."""
PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "baddbmm", "scaled_dot_product_attention"})
"""A module whose own code calls one of these may choose by a matmul of activations, not by its weight's result."""


def find_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Find routers: the modules that a choice depends on: owners of the weight, and modules around one that do nothing
    else.

    Example:
        >>> class Mixture(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate, self.shared_gate = nn.Linear(8, 4), nn.Linear(8, 1)
        ...         self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        ...
        ...     def forward(self, x):
        ...         return self.gate(x).topk(2, dim=-1)
        >>> list(find_routers(Mixture()))
        [Linear(in_features=8, out_features=4, bias=True)]
    """
    search = _Search(model)
    found: set[nn.Module] = set()
    around: set[nn.Module] = set()
    for module in search.innermost_first:
        if any(child in around for child in module.children()):  # the choice is made inside
            around.add(module)
            continue
        routers = search.routers_of(module)
        for router in routers:
            found |= {router, *search.owners[router]}
        if routers:
            around.add(module)
    yield from (module for module in model.modules() if module in found)


class _Search:
    """The questions that are asked of each module of a model, answered once."""

    def __init__(self, model: nn.Module) -> None:
        self.innermost_first = list(reversed(list(model.modules())))
        self._parents = {child: parent for parent in model.modules() for child in parent.children()}
        self.owners: dict[nn.Module, list[nn.Module]] = {}
        """The modules inside, the module too, that own matrices."""
        self._experts: dict[nn.Module, set[int]] = {}
        """Numbers of experts that a module's children hold."""
        self._code: dict[type[nn.Module], tuple[bool, frozenset[str]]] = {}
        for module in self.innermost_first:
            inner = (owner for child in module.children() for owner in self.owners.get(child, ()))
            self.owners[module] = [*([module] if _matrices(module) else []), *inner]
            self._experts[module] = {count for child in module.children() if (count := num_experts(child)) > 1}

    def routers_of(self, module: nn.Module) -> list[nn.Module]:
        """The routers among a module and its children; none if it does not choose."""
        owners = self.owners[module]
        if not owners:
            return []
        recorded, own = self._code_of(module)
        inside = self._experts[module]
        beside = self._experts[self._parents[module]] if module in self._parents else set()
        single = len(owners) == 1
        if inside:  # a mixture
            if not recorded and not CHOOSING & (own | called_by_functions(type(module))):
                return []
            matching = [child for child in self._simple(module) if _rows(self.owners[child][0]) & inside]
            if matching:
                return matching
        elif beside:  # beside the experts of a mixture
            matches = any(_rows(owner) & beside for owner in owners)
            chooses = "topk" in own or (single and SELECTING & (own | called_by_functions(type(module))))
            if recorded or (matches and chooses):
                return [module]
        if single and (recorded or ("topk" in own and (owners == [module] or not PRODUCTS & own))):
            return [module]
        if not recorded:
            return []
        read = {matrix.shape[1] for owner in owners for matrix in _matrices(owner)}
        unread = [child for child in self._simple(module) if not _rows(self.owners[child][0]) & (read | {1})]
        return unread if len(unread) == 1 else []

    def _simple(self, module: nn.Module) -> list[nn.Module]:
        """Simple children in the search for routers, with one matrix inside."""
        return [child for child in module.children() if len(self.owners[child]) == 1]

    def _code_of(self, module: nn.Module) -> tuple[bool, frozenset[str]]:
        """True if transformers records a module's result as router logits, and the names that its own methods call."""
        kind = type(module)
        if kind not in self._code:
            self._code[kind] = recorded_as("router_logits", kind), called(kind)
        return self._code[kind]


def _matrices(module: nn.Module) -> list[Tensor]:
    """The weights that a candidate for a router multiplies by; look-up tables left out."""
    if isinstance(module, nn.Embedding):
        return []
    return [tensor for tensor in own_tensors(module).values() if tensor.ndim == 2 and tensor.is_floating_point()]


def _rows(owner: nn.Module) -> set[int]:
    return {matrix.shape[0] for matrix in _matrices(owner)}


def num_experts(module: nn.Module) -> int:
    """Count the experts that a module holds behind a router: a collection of modules with like weights, or weights [E,
    N, K]; else 0. A collection that other ranks hold the rest of says the whole number (`num_in_whole`)."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in module.children()}
        return getattr(module, "num_in_whole", len(module)) if len(shapes) == 1 and shapes != {()} else 0
    if isinstance(module, _ConvNd):
        return 0
    stacked = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    return stacked.pop() if len(stacked) == 1 else 0

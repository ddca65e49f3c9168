"""Where a model chooses, between experts most of all: found by structure and by what a module's code calls.

A module chooses if its code calls `topk` or the like, or if transformers records what it returns as router logits. Of
such a module a weight is a router's if its rows are what is chosen among: it has one for each of the experts beside it,
or it is the only weight there is, or the only one whose result no weight beside it reads. No example input is needed,
and no name of a class or an attribute is compared. A policy's rules name a router that this misses, and un-name one.
Read `find_routers` first, then `_routers_of`.
"""

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

CHOOSING = frozenset({"topk", "argmax", "argsort", "multinomial"})
"""A module that calls one of these chooses."""
SELECTING = CHOOSING | {"max", "sort", "gather"}
"""A module of one weight that calls one of these, with as many rows as there are experts beside it, chooses."""
PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "baddbmm", "scaled_dot_product_attention"})
"""A module whose own code calls one of these may choose by a product of activations, not by the result of its weight."""
_CALLS = 3
"""How many calls deep the functions are followed that a module's methods call."""


def find_routers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a choice depends on: owners of the weight, and modules around one that do nothing else.

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
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    found: set[nn.Module] = set()
    for module in reversed(list(model.modules())):  # the innermost choice first: what is around it makes none
        if found.isdisjoint(module.modules()):
            for router in _routers_of(module, parents.get(module)):
                found |= {router, *_owners(router)}
    yield from (module for module in model.modules() if module in found)


def _routers_of(module: nn.Module, parent: nn.Module | None) -> list[nn.Module]:
    """The routers among a module and its children; none if it does not choose."""
    owners = _owners(module)
    if not owners:
        return []
    recorded = _is_recorded(module)
    own = _called(_methods(module))
    inside = _counts(module)
    beside = _counts(parent) if parent is not None else set()
    single = len(owners) == 1
    simple = [child for child in module.children() if len(_owners(child)) == 1]
    if inside:  # a mixture
        if not recorded and not CHOOSING & (own | _called_by_functions(module)):
            return []
        matching = [child for child in simple if _rows(_owners(child)[0]) & inside]
        if matching:
            return matching
    elif beside:  # a router, beside experts
        matches = any(_rows(owner) & beside for owner in owners)
        if recorded or (matches and ("topk" in own or (single and SELECTING & (own | _called_by_functions(module))))):
            return [module]
    if single and (recorded or ("topk" in own and (owners == [module] or not PRODUCTS & own))):
        return [module]
    read = {matrix.shape[1] for owner in owners for matrix in _matrices(owner)}
    unread = [child for child in simple if not _rows(_owners(child)[0]) & (read | {1})]
    sure = recorded or (bool(inside) and "topk" in own)
    return unread if sure and len(unread) == 1 else []


# ---- structure ----


def _owners(module: nn.Module) -> list[nn.Module]:
    """The modules inside, itself too, that own matrices; look-up tables apart."""
    return [inner for inner in module.modules() if _matrices(inner)]


def _matrices(module: nn.Module) -> list[Tensor]:
    if isinstance(module, nn.Embedding):
        return []
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))  # a frozen FP8 weight is a buffer
    return [tensor for tensor in tensors if tensor.ndim == 2 and tensor.is_floating_point()]


def _rows(owner: nn.Module) -> set[int]:
    return {matrix.shape[0] for matrix in _matrices(owner)}


def _counts(parent: nn.Module) -> set[int]:
    """Numbers of experts that the children of a module have."""
    return {count for child in parent.children() if (count := _num_experts(child)) > 1}


def _num_experts(module: nn.Module) -> int:
    """How many experts a module holds: a collection of modules of like weights, or stacked weights [E, N, K]; else 0."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in module.children()}
        return len(module) if len(shapes) == 1 and shapes != {()} else 0
    if isinstance(module, _ConvNd):
        return 0
    stacked = {parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    return stacked.pop() if len(stacked) == 1 else 0


# ---- what code calls ----


def _methods(module: nn.Module) -> list[FunctionType]:
    """The forward of a module's class and the methods that it calls on itself."""
    found: list[FunctionType] = []
    open_ = [getattr(type(module), "forward", None)]
    while open_:
        function = _unwrapped(open_.pop())
        if function is not None and function not in found:
            found.append(function)
            open_ += [getattr(type(module), name, None) for name in _names(function.__code__)]
    return found


def _called_by_functions(module: nn.Module) -> frozenset[str]:
    """What the functions call that a module's methods call, a few calls deep."""
    found: list[FunctionType] = []
    callers = _methods(module)
    for _ in range(_CALLS):
        called = {
            function
            for caller in callers
            for name in _names(caller.__code__)
            if (function := _unwrapped(caller.__globals__.get(name))) is not None and function not in found
        }
        found += called
        callers = list(called)
    return _called(found)


def _called(functions: list[FunctionType]) -> frozenset[str]:
    return frozenset(name for function in functions for name in _names(function.__code__))


def _names(code: CodeType) -> frozenset[str]:
    """Names of globals and attributes in a function's code, and in the functions that it defines."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*(_names(each) for each in inner))


def _unwrapped(value: Any) -> FunctionType | None:
    """The Python function behind decorators that keep it; None for anything else."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


# ---- what transformers records ----


def _is_recorded(module: nn.Module) -> bool:
    """Whether transformers records what a module returns as router logits: tables of the models in its source say so."""
    source = sys.modules.get(type(module).__module__)
    tables = (getattr(value, "_can_record_outputs", None) for value in vars(source).values()) if source else ()
    for table in tables:
        records = table.get("router_logits", ()) if isinstance(table, Mapping) else ()
        for record in records if isinstance(records, list | tuple) else (records,):
            target = getattr(record, "target_class", record)
            if isinstance(target, type) and isinstance(module, target):
                return True
    return False

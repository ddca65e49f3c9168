"""Layers that are never called: the module around them takes their weights, as attention of WavLM gives those of its
projections to `F.multi_head_attention_forward`. An adapter, and FP8 codes, work in the layer's own forward pass.

Found in the source of the class around: it reads `self.layer.weight`, and nowhere calls `self.layer`. Where there is no
source nothing is found.
"""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator

from torch import nn

from tilewright.precision.mixed.derived import plain_class

_INITIALISE = {"__init__", "_init_weights", "init_weights", "reset_parameters", "_reset_parameters"}
"""Methods that read weights to write them."""


def never_called(model: nn.Module) -> dict[str, str]:
    """Names of layers that are never called because the module around reads their weights, with that module's class.

    Example:
        >>> never_called(nn.TransformerEncoderLayer(8, 2)), list(never_called(nn.MultiheadAttention(8, 2)))
        ({'self_attn.out_proj': 'MultiheadAttention'}, ['out_proj'])
    """
    found = {}
    for name, module in model.named_modules():
        kind = plain_class(module)
        taken = _taken(kind)
        for child, layer in module.named_children():
            if child in taken and isinstance(getattr(layer, "weight", None), nn.Parameter):
                found[f"{name}.{child}" if name else child] = kind.__name__
    return found


@functools.lru_cache(maxsize=1024)
def _taken(kind: type[nn.Module]) -> frozenset[str]:
    """Attributes of `self` whose weight a class takes from an uncalled layer: it reads but does not call it."""
    read: set[str] = set()
    called: set[str] = set()
    kinds = kind.__mro__[: kind.__mro__.index(nn.Module)]
    if not any(_may_read(one.__module__) for one in kinds):
        return frozenset()
    for one in kinds:
        for method in _methods(one):
            read |= set(_reads(method))
            called |= {attr for node in ast.walk(method) if isinstance(node, ast.Call) and (attr := _own(node.func))}
    return frozenset(read - called)


@functools.lru_cache(maxsize=1024)
def _may_read(module: str) -> bool:
    """True if a module's source may read the weight of an uncalled layer. This check comes before the source is split
    into classes, which takes a second for a large model."""
    try:
        return re.search(r"\bself\s*\.\s*\w+\s*\.\s*weight\b", inspect.getsource(sys.modules[module])) is not None
    except (OSError, TypeError, KeyError):
        return True


def _methods(kind: type) -> Iterator[ast.AST]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or by an extension
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in _INITIALISE:
            yield node


def _reads(method: ast.AST) -> Iterator[str]:
    """Attributes of `self` of which a method reads `weight` as a whole: not `self.layer.weight.dtype`."""
    of_weight = {node.value for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and node.attr == "weight" and node not in of_weight:
            attr = _own(node.value)
            if attr is not None:
                yield attr


def _own(node: ast.AST) -> str | None:
    """X of `self.X`, perhaps an uncalled layer."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return None

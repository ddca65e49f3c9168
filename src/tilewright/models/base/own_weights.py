"""Finds out if a module multiplies by a parameter of its own, as far as its source text tells.

A parameter that only meets element-wise operations is no weight of a matmul: a position table that is added, a decay
rate that goes through an exponential. Where the source is not to be had, or a parameter leaves the module's code by
another way, it may be multiplied by.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable

from torch import Tensor, nn

from tilewright.models.base.class_code import called, called_by_functions, methods
from tilewright.ops.base.code_modules import own_tensors

PRODUCTS = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "bilinear"),
        *("grouped_mm", "_grouped_mm"),
    }
)
"""Functions that multiply matrices."""
_VIEWS = frozenset(
    {
        *("to", "float", "half", "bfloat16", "type", "type_as", "t", "transpose", "permute", "view", "reshape"),
        *("unbind", "chunk", "split", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "contiguous"),
        *("narrow", "select"),
    }
)
"""Methods whose result is the same weight, or a part of it."""


def held_weight(module: nn.Module) -> Tensor | None:
    """Held weight of a layer, its own, also as a buffer or codes; None where each forward computes it, as weight norms
    and torch's parametrizations do: reading that attribute would compute it, and may change what it is computed from.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> held_weight(layer) is layer.weight, held_weight(nn.utils.parametrizations.weight_norm(layer))
        (True, None)
    """
    return own_tensors(module).get("weight")


@functools.lru_cache(maxsize=256)
def may_multiply(kind: type[nn.Module], parameter: str) -> bool:
    """True if the code of a class may itself multiply matrices by this parameter."""
    if not PRODUCTS & (called(kind) | called_by_functions(kind)):
        return False
    uses = _Uses(parameter)
    for function in methods(kind):
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            return True
        uses.read(ast.parse(textwrap.dedent(source)))
    return uses.multiplied or not uses.seen


class _Uses:
    """How a parameter is used in the methods of a class."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self.seen = False
        self.multiplied = False

    def read(self, method: ast.AST) -> None:
        """Read the uses of own weights in one method."""
        names: set[str] = set()
        for _ in range(2):  # a name may be given after, in a loop
            for node in ast.walk(method):
                if isinstance(node, ast.Assign) and self._is_weight(node.value, names):
                    given = (name for target in node.targets for name in ast.walk(target))
                    names |= {name.id for name in given if isinstance(name, ast.Name)}
        for node in ast.walk(method):
            if self._is_weight(node, names):
                self.seen = True
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                self.multiplied |= self._any_weight((node.left, node.right), names)
            elif isinstance(node, ast.Call) and not _is_elementwise(node.func):
                arguments = (*node.args, *(keyword.value for keyword in node.keywords))
                self.multiplied |= self._any_weight(arguments, names)
                if isinstance(node.func, ast.Attribute) and node.func.attr in PRODUCTS:
                    self.multiplied |= self._is_weight(node.func.value, names)

    def _any_weight(self, nodes: Iterable[ast.expr], names: set[str]) -> bool:
        return any(self._is_weight(node, names) for node in nodes)

    def _is_weight(self, node: ast.AST, names: set[str]) -> bool:
        """True if an expression is a module's own weight, or a view or cast of it."""
        while True:
            if isinstance(node, ast.Name):
                return node.id in names
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    return node.attr == self._parameter
                node = node.value  # weight.T
            elif isinstance(node, ast.Subscript | ast.Starred):
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _VIEWS:
                node = node.func.value
            else:
                return False


def _is_elementwise(function: ast.expr) -> bool:
    """True for an element-wise function beside own weights: one of torch that is no matmul, or a method of a tensor
    that is none."""
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in PRODUCTS:
        return False
    root = function.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return not (isinstance(root, ast.Name) and root.id == "self")

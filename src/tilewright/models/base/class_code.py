"""Facts about a module from the code of its class, without running it and without its source text.

Names are those that its compiled functions refer to: of attributes, methods and globals alike.
"""

import dis
import functools
import sys
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_DEPTH = 3
"""How many calls deep functions are followed."""


def called(kind: type[nn.Module]) -> frozenset[str]:
    """Names that the code of a class calls: in its forward, and in the methods that it calls on itself.

    Example:
        >>> "linear" in called(nn.Linear), "topk" in called(nn.Linear)
        (True, False)
    """
    return _all_names(methods(kind))


def called_by_functions(kind: type[nn.Module]) -> frozenset[str]:
    """Names that functions call which a class's forward and methods call, a few calls deep."""
    found: set[FunctionType] = set()
    callers: Iterable[FunctionType] = methods(kind)
    for _ in range(_DEPTH):
        functions = {
            function
            for caller in callers
            for name in _names(caller.__code__)
            if (function := _unwrapped(caller.__globals__.get(name))) is not None
        }
        callers = functions - found
        found |= functions
    return _all_names(found)


def recorded_as(what: str, kind: type[nn.Module]) -> bool:
    """True if transformers records what a class of modules returns, by the tables in the code of its source file.

    Args:
        what: an entry of these tables, such as "router_logits".
        kind: of module.
    """
    source = sys.modules.get(kind.__module__)
    tables = (getattr(value, "_can_record_outputs", None) for value in vars(source).values()) if source else ()
    for table in tables:
        records = table.get(what, ()) if isinstance(table, Mapping) else ()
        for record in records if isinstance(records, list | tuple) else (records,):
            target = getattr(record, "target_class", record)
            if isinstance(target, type) and issubclass(kind, target):
                return True
    return False


def methods(kind: type[nn.Module]) -> set[FunctionType]:
    """The forward of a class and the methods that it calls on itself, decorators taken off."""
    found: set[FunctionType] = set()
    ahead = [getattr(kind, "forward", None)]
    while ahead:
        function = _unwrapped(ahead.pop())
        if function is not None and function not in found:
            found.add(function)
            ahead += [getattr(kind, name, None) for name in _names(function.__code__)]
    return found


def _all_names(functions: Iterable[FunctionType]) -> frozenset[str]:
    return frozenset(name for function in functions for name in _names(function.__code__))


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Names in a function's code, and in that of the functions that it defines. The operator @ is a matmul."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    operators = {"matmul" for instruction in dis.get_instructions(code) if instruction.argrepr in ("@", "@=")}
    return frozenset(code.co_names).union(operators, *(_names(each) for each in inner))


def _unwrapped(value: Any) -> FunctionType | None:
    """The Python function of a class's code behind decorators that keep it; None for anything else."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None

"""Calls in compiled code that the compiler does not look into.

The decorators import torch's compiler, which takes seconds. So callers import this module while something is compiled.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def _uncompiled(function: F) -> F:
    return cast(Any, torch.compiler.disable)(function)  # whose annotation has other arguments


@_uncompiled
def eager(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Eager and opaque to the compiler: `function(*args, **kwargs)`, run uncompiled each time: for shapes that depend
    on the data."""
    return function(*args, **kwargs)


@torch.compiler.assume_constant_result
def constant(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Constant and opaque to the compiler: `function(*args, **kwargs)`, called once per graph; its result is a constant
    of the graph.

    Args:
        function: a plain Python function.
        args, kwargs: constants of the graph themselves.
    """
    return function(*args, **kwargs)

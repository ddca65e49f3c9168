"""A place to build a model for its shapes: on the meta device, where no initial values are drawn for weights without
bytes.

torch's own initialisation of a meta tensor imports torch's compiler, which takes seconds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_INITIALISERS = {value for name, value in vars(nn.init).items() if name.endswith("_") and callable(value)}


class _NoInit(TorchFunctionMode):
    """Leaves the functions of `torch.nn.init` out."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _INITIALISERS:
            given = dict(kwargs or {})
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """New tensors inside have a shape and a dtype, and no bytes."""
    with torch.device("meta"), _NoInit():
        yield

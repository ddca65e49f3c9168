"""An allocator that finds no memory when it is reported to: at any allocation of a step, on any device."""

from collections.abc import Collection

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TEXT = "[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 B"
"""What torch's own allocator says on a CPU; an error without a class of its own."""


def allocates(op) -> bool:
    """Whether an operator makes a tensor that is no view of another, and writes into none of its arguments."""
    returns = op._schema.returns
    return any(value.alias_info is None and "Tensor" in str(value.type) for value in returns)


class Allocator(TorchDispatchMode):
    """Counts the allocations made inside, and fails at some of them.

    Args:
        fail: numbers of the allocations that find no memory, counted from 0. Those that are tried again count again.
        kind: of error: that of the device's allocator, of the CPU's, or Python's.
    """

    def __init__(self, fail: Collection[int] = (), kind: str = "device") -> None:
        super().__init__()
        self.fail = frozenset(fail)
        self.kind = kind
        self.count = 0
        self.failed: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if allocates(func):
            number, self.count = self.count, self.count + 1
            if number in self.fail:
                self.failed.append(str(func))
                raise self._error()
        return func(*args, **(kwargs or {}))

    def _error(self) -> BaseException:
        if self.kind == "device":
            return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return RuntimeError(TEXT) if self.kind == "cpu" else MemoryError()

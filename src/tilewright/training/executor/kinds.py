"""The executors by name: what each can do, and what makes one."""

from collections.abc import Mapping
from types import MappingProxyType

from tilewright.core.config.executors import capabilities_of
from tilewright.training.executor.base import ExecutorKind
from tilewright.training.executor.layer_major_setup import layer_major_executor
from tilewright.training.executor.standard import standard_executor

_MAKE = MappingProxyType({"standard": standard_executor, "layer_major": layer_major_executor})
KINDS: Mapping[str, ExecutorKind] = MappingProxyType(
    {name: ExecutorKind(capabilities_of(name), make) for name, make in _MAKE.items()}
)
"""By the values of `memory.executor`."""

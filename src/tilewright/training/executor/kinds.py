"""The executors by name: what each can do, and what makes one."""

from collections.abc import Mapping
from types import MappingProxyType

from tilewright.core.config.conflicts import executor_conflicts
from tilewright.core.config.executors import Capabilities, capabilities_of
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError, Problem
from tilewright.training.executor.base import ExecutorKind
from tilewright.training.executor.layer_major_setup import layer_major_executor
from tilewright.training.executor.standard import standard_executor

_MAKE = MappingProxyType({"standard": standard_executor, "layer_major": layer_major_executor})
KINDS: Mapping[str, ExecutorKind] = MappingProxyType(
    {name: ExecutorKind(capabilities_of(name), make) for name, make in _MAKE.items()}
)
"""By the values of `memory.executor`."""


def executor_of(recipe: Recipe, given: ExecutorKind | None = None) -> ExecutorKind:
    """What runs a recipe's steps: the executor that the caller gives, or the one that it names."""
    return given or KINDS[recipe.memory.executor]


def check_executor(recipe: Recipe, can: Capabilities) -> None:
    """Refuse an executor that a caller gives and that cannot do what a recipe asks.

    Raises:
        ConfigError: it cannot.
    """
    found = executor_conflicts(recipe, can, "an executor that the caller gave")
    problems = [Problem(c.what, c.got, c.need, c.try_, ", ".join(c.fields)) for c in found]
    if problems:
        raise ConfigError.from_problems(problems)

"""Classes made over the class of a module, which change its forward in place.

A maker is a function at the top of a file, cached: it makes a subclass of a class. `derive` gives a module the class
that a maker makes of its own. Parameters, names, hooks and state_dict stay what they were. Copies and pickles work, of
modules that several makers had too, and so do torch's parametrizations, before and after: torch puts a class of its own
on each such module, which has to stay the outermost, as `remove_parametrizations` takes that off.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

Maker = Callable[[type[nn.Module]], type[nn.Module]]


class Derived:
    """Marks the classes that makers made. Each has in its namespace `made_by`, its maker, and `plain`, what of."""

    made_by: Maker
    plain: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A derived class called with arguments, as transformers' `type(model).from_pretrained` does, it makes a module
        of the class that makers began with: only `derive` gives a module another one. Without arguments torch copies a
        module."""
        if not args and not kwargs:
            return super().__new__(cls)
        return next(kind for kind in cls.__mro__ if not issubclass(kind, Derived))(*args, **kwargs)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        """Pickle a derived class by naming the makers and the class that they began with: pickle finds no class that
        was made."""
        kind, makers = type(self), []
        while "made_by" in vars(kind):
            makers.append(vars(kind)["made_by"])
            kind = vars(kind)["plain"]
        return _rebuild, (kind, makers), self.__getstate__()


def _rebuild(kind: type[nn.Module], makers: Sequence[Maker]) -> nn.Module:
    for maker in reversed(makers):
        kind = maker(kind)
    return kind.__new__(kind)


def derive(module: nn.Module, maker: Maker) -> None:
    """Give a module a derived class: the one that the maker makes of its class."""
    kind = type(module)
    module.__class__ = rebased(kind, maker(kind.__bases__[0])) if is_injected(module) else maker(kind)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before makers and parametrizations derived others from it."""
    kind = type(module).__bases__[0] if is_injected(module) else type(module)
    while "made_by" in vars(kind):
        kind = vars(kind)["plain"]
    return kind


def is_injected(module: nn.Module) -> bool:
    """True where the module's derived class is the one that `torch.nn.utils.parametrize` made for it."""
    parametrized = module._modules.get("parametrizations")
    names = vars(type(module))
    return parametrized is not None and all(isinstance(names.get(name), property) for name in parametrized._modules)


def parametrizations(model: nn.Module) -> list[parametrize.ParametrizationList]:
    """Parametrizations that compute weights of a model, whose classes are derived."""
    return [module for module in model.modules() if isinstance(module, parametrize.ParametrizationList)]


def rebased(kind: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Derive a class like `kind` from another base."""
    names = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (*kind.__bases__[:-1], base), names)

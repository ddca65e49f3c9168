"""Stand-ins for the layers of a foreign model: its own forward runs, and what each layer does is the caller's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Visit = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Of a layer's number and its arguments, what the layer gives."""


class _StandIn(nn.Module):
    """A stand-in for a layer: its call goes to `visit`; attributes are the layer's."""

    def __init__(self, index: int, layer: nn.Module, visit: Visit) -> None:
        super().__init__()
        self._index, self._visit = index, visit
        self._layer = (layer,)  # in a tuple, so that it is not registered

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_layer")[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._visit(self._index, args, kwargs)


@contextmanager
def stand_ins(parent: nn.Module, name: str, visit: Visit, layers: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Inside, the list of layers of a model is one of stand-ins.

    Args:
        parent, name: of the list.
        visit: called in the place of each layer.
        layers: that they answer for; None: those in the list.

    Example:
        >>> net = nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), nn.Identity()])})
        >>> with stand_ins(net, "layers", lambda index, args, kwargs: args[0] + index):
        ...     net.layers[1](40)
        41
        >>> net.layers[1](40)
        40
    """
    real = getattr(parent, name)
    members = (_StandIn(index, layer, visit) for index, layer in enumerate(real if layers is None else layers))
    parent._modules[name] = nn.ModuleList(members)
    try:
        yield
    finally:
        parent._modules[name] = real

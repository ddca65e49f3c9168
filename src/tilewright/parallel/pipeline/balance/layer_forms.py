"""Which layers of a model cost alike: those with matrices of the same shapes, and the same window of attention."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

_WINDOWS = ("window", "sliding_window")
"""Attributes of attention modules: tilewright's own, and those of transformers."""


class LayerForm(NamedTuple):
    """The facts on which the cost of a layer's passes depends, beside its input."""

    word: str
    """In a few letters."""
    matrices: tuple[tuple[tuple[int, ...], int], ...]
    """Shapes, of the whole matrix where ranks share it, and how many there are of each."""
    windows: tuple[int, ...]

    @staticmethod
    def of(layer: nn.Module) -> "LayerForm":
        """The form of a layer, by which kinds differ.

        Example:
            >>> LayerForm.of(nn.Linear(3, 2)).matrices
            (((2, 3), 1),)
        """
        shapes = Counter(tuple(param.shape) for param in layer.parameters() if param.dim() > 1)
        found = [getattr(module, name, None) for module in layer.modules() for name in _WINDOWS]
        word = "moe" if any(".experts." in f".{name}" for name, _ in layer.named_parameters()) else "dense"
        return LayerForm(
            word, tuple(sorted(shapes.items())), tuple(one for one in found if isinstance(one, int) and one)
        )


def kinds_of(forms: Iterable[LayerForm]) -> list[str]:
    """Name the kind of each layer: the word of its form, numbered from the second form of that word on.

    Args:
        forms: of the layers of a model, in their order.

    Example:
        >>> wide, narrow = (LayerForm("dense", (((size, 8), 3),), ()) for size in (32, 16))
        >>> kinds_of([wide, narrow, LayerForm("moe", (), ()), narrow, wide])
        ['dense', 'dense 2', 'moe', 'dense 2', 'dense']
    """
    names: dict[LayerForm, str] = {}
    found = []
    for form in forms:
        if form not in names:
            before = sum(other.word == form.word for other in names)
            names[form] = f"{form.word} {before + 1}" if before else form.word
        found.append(names[form])
    return found

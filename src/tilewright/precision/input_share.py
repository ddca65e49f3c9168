"""Quantised copies of one input, shared by the layers that read it: query, key and value; gate and up."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.formats.tiled import TiledTensor


@dataclass(frozen=True)
class InputCopies:
    """An input [N, K] as its products want it; None where a product has no 8-bit operands.

    `row` is what fprop reads, [N, K]. `column` is what wgrad reads: the input transposed, [K, N].
    """

    row: TiledTensor | None
    column: TiledTensor | None


class InputShare:
    """Where layers side by side find the copies of an input that one of them has made.

    An input is the same if it is the same tensor object with the same version: nothing has written to it since. The
    copies live as long as it does, or until `readers` layers have taken them: backward may keep the input for long.
    Eager mode only: torch.compile finds the repeated quantisation by itself.

    Args:
        readers: how many layers ask for the copies of one input; 0 where that is not known.
    """

    def __init__(self, readers: int = 0) -> None:
        self._readers = readers
        self._left = 0
        self._source: weakref.ref[Tensor] | None = None
        self._key: tuple[object, ...] = ()
        self._copies: InputCopies | None = None

    def copies_of(self, x: Tensor, key: tuple[object, ...], make: Callable[[], InputCopies]) -> InputCopies:
        """The copies of `x` for layers with the settings `key`: those at hand, or new ones from `make`."""
        if torch.compiler.is_compiling():
            return make()
        key = (*key, None if x.is_inference() else x._version)  # an inference tensor has no version
        if self._copies is None or self._source is None or self._source() is not x or self._key != key:
            self._copies = make()
            self._key = key
            self._source = weakref.ref(x, self._forget)
            self._left = self._readers
        copies = self._copies
        self._left -= 1
        if self._left == 0:
            self._source = self._copies = None
        return copies

    def _forget(self, source: "weakref.ref[Tensor]") -> None:
        if source is self._source:
            self._source = self._copies = None

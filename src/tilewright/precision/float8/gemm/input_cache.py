"""Quantised copies of one input, shared by the layers that read it: query, key and value; gate and up."""

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tilewright.formats.tiled import Parts, TiledTensor
from tilewright.ops.base.fingerprint import fingerprint


@dataclass(frozen=True)
class InputCopies:
    """An input [N, K] as its GEMMs want it; None where a GEMM has no 8-bit operands.

    `row` is what fprop reads, [N, K]. `column` is what wgrad reads: the input transposed, [K, N].
    """

    row: TiledTensor | None
    column: TiledTensor | None
    arrive: Callable[[Parts], Parts] | None = None
    """See `WithCopies`."""


@dataclass
class _Shared:
    """Copies of one input in one thread. Nothing but `left` changes, so a reader sees all of it or another one."""

    source: weakref.ref[Tensor]
    key: tuple[object, ...]
    copies: InputCopies
    left: int
    """Layers that have not asked yet; below zero where their number is not known."""


class InputShare:
    """Where layers side by side find the copies of an input that one of them has made.

    An input is the same if it is the same tensor object with the same bytes, by a hash of them: writes through numpy,
    `.data` or under `inference_mode` leave no other sign. A hash on a GPU would have to be waited for, so nothing is
    shared there in eager mode. Under torch.compile the compiler finds the repeated quantisation itself.

    The copies live until `readers` layers have taken them, until `forget`, or until the input dies: backward may keep
    an input for long. Each thread has its own, so calls at the same time share nothing. Copies and pickles of a share
    are empty.

    Args:
        readers: how many layers ask for the copies of one input; 0 where that is not known.
    """

    def __init__(self, readers: int = 0) -> None:
        self._readers = readers
        self._by_thread: dict[int, _Shared] = {}

    def copies_of(self, x: Tensor, key: tuple[object, ...], make: Callable[[], InputCopies]) -> InputCopies:
        """The cached copies of an input `x` for layers with the settings `key`: those there are, or new ones from
        `make`."""
        if torch.compiler.is_compiling():
            return make()
        if not isinstance(x, FakeTensor):  # these have no values that could change
            if type(x) is not Tensor or x.device.type != "cpu" or not x.is_contiguous():
                return make()
            key = (*key, fingerprint(x))
        thread = threading.get_ident()
        shared = self._by_thread.get(thread)
        if shared is None or shared.source() is not x or shared.key != key:
            shared = _Shared(weakref.ref(x, functools.partial(self._drop, thread)), key, make(), self._readers)
            self._by_thread[thread] = shared
        shared.left -= 1
        if shared.left == 0:
            self.forget()
        return shared.copies

    def forget(self) -> None:
        """Forget this thread's cached copies of an input."""
        self._by_thread.pop(threading.get_ident(), None)

    def _drop(self, thread: int, source: "weakref.ref[Tensor]") -> None:
        """Drop a cached input that died, in whatever thread."""
        shared = self._by_thread.get(thread)
        if shared is not None and shared.source is source:
            self._by_thread.pop(thread, None)

    def __reduce__(self) -> tuple[type["InputShare"], tuple[int]]:
        return InputShare, (self._readers,)

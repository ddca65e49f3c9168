"""Bytes that operations keep and move, and their FLOPs, counted as they run: on real tensors or on fake ones.

`LiveBytes` counts bytes, and FLOPs by the format and the module that they run in; `MatmulCounter` counts FLOPs alone.
Both know operations that torch's own counter does not.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from tilewright.planner.trace.operation_kinds import ATTENTION, ATTENTION_BACKWARD, GATHERS, formulas, moves

_aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
"""What autograd asks of each fake tensor several times: two of three calls. It is answered at once, as the mode of fake
tensors would."""


@dataclass(frozen=True)
class GemmKind:
    """Matrix matmuls that cost alike for each FLOP.

    `module`: name of the linear layer that they are part of, empty outside of all (`LiveBytes.watching`). `dtype`: of
    the operands. `width`: square root of the weight's elements. `groups`: weights that one operation multiplies by
    (experts in one tensor).
    """

    module: str
    dtype: torch.dtype
    width: float
    groups: int


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among the arguments or results of an operation, and in lists of them (there is nothing deeper), whose
    bytes are counted. torch's own walk through trees takes several times as long, and this is called at each operation.

    Example:
        >>> len([*tensors_in((torch.ones(2), 3, [torch.ones(1), None]))])
        2
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class TooLong(Exception):
    """More operations than `LiveBytes` was to count."""


class MatmulCounter(TorchDispatchMode):
    """Counts FLOPs of matmuls and of fused attention's forward pass.

    Attributes:
        gemms: (calls, FLOPs) of matmuls, by kind. Attention is not among them.
        attention: FLOPs of fused attention's forward pass.
        times: how often each operation counts (`begin_repeated`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.gemms: dict[GemmKind, tuple[int, float]] = {}
        self.attention = 0.0
        self.times = 1
        self._module = ""

    @property
    def flops(self) -> float:
        """FLOPs of all kinds of matmuls that were counted, attention's among them."""
        return flops_of(self.gemms) + self.attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count its matmuls and bytes."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        self._count_matmuls(func.overloadpacket, out, args, kwargs or {})
        return out

    def _count_matmuls(self, packet: Any, out: Any, args: Any, kwargs: Any) -> None:
        formula = formulas().get(packet)
        if formula is None or packet in ATTENTION_BACKWARD:
            return
        flops = self.times * formula(*args, **kwargs, out_val=out)
        if packet in ATTENTION:
            self.attention += flops
            return
        kind = _kind(self._module, packet, args)
        calls, before = self.gemms.get(kind, (0, 0.0))
        self.gemms[kind] = (calls + self.times, before + flops)

    def begin_repeated(self, times: int) -> None:
        """Begin operations that the byte counter counts several times; see the function of this name."""
        self.end_repeated()
        self.times = times

    def walk(self, moved: int, fresh: int) -> None:
        """Count bytes that an operation would move, and of these those in a new storage."""

    def end_repeated(self) -> None:
        """End operations that the byte counter counts several times; see the function of this name."""
        self.times = 1


class LiveBytes(MatmulCounter):
    """Counts bytes of storages that operations make, for as long as they live, and what operations move and compute.

    Args:
        limit: operations after which `TooLong` is raised; 0: none. Settable; not inside of a backward pass, out of
            which no exception of this kind comes.

    Attributes:
        live, peak: bytes now, and at most.
        landed: of `live`, gradients of parameters that are complete (`watching`).
        passing_peak: most bytes beside complete gradients.
        moved: bytes read and written by all that is no matmul and no attention, views left out.
        fresh: of the bytes that these write, those in storages that they make.
        in_backward: set it while autograd runs backward. It adds gradients up in place; on fake tensors, which are a
            subclass, it makes a new tensor and drops the old one at once.
        operations: how many ran.
    """

    def __init__(self, limit: int = 0) -> None:
        super().__init__()
        self.live = self.peak = self.moved = self.fresh = 0
        self.in_backward = False
        self.landed = self.passing_peak = 0
        self.operations = 0
        self.limit = limit
        self._times_of: dict[int, int] = {}
        """By storage: in how many equal passes there is one like it."""
        self._pass: _FirstPass | None = None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, the byte counter tells matmuls of linear layers by these layers, and complete gradients of parameters
        from others."""
        handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if _is_linear(module):
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: setattr(self, "_module", name)))
                handles.append(module.register_forward_hook(lambda *_: setattr(self, "_module", "")))
        for parameter in model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._land))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _land(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.landed += parameter.grad.nbytes

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and count the bytes that it keeps alive."""
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # asks for a property of a fake tensor
            return out
        self.operations += self.times
        if self.limit and self.operations > self.limit:
            raise TooLong(f"more than {self.limit:,} operations")
        self._count_matmuls(func.overloadpacket, out, args, kwargs or {})
        read = [*tensors_in(args), *tensors_in((kwargs or {}).values())]
        old = {id(t.untyped_storage()) for t in read}
        written = [*tensors_in((out,))]
        in_place = self.in_backward and func is _aten.add.Tensor and written[0].shape == read[0].shape
        made = sum(self._add(tensor.untyped_storage(), old) for tensor in written)
        if not in_place:
            self._reach(self.live)
        if moves(func):
            self.fresh += 0 if in_place else self.times * made
            walked = (*written, *written) if func.overloadpacket in GATHERS else (*read, *written)
            self.moved += self.times * sum(map(_walked, walked))
        return out

    def walk(self, moved: int, fresh: int) -> None:
        self.moved += self.times * moved
        self.fresh += self.times * fresh

    def begin_repeated(self, times: int) -> None:
        super().begin_repeated(times)
        if times > 1:
            self._pass = _FirstPass(self.live)

    def end_repeated(self) -> None:
        one, more = self._pass, self.times - 1
        self._pass, self.times = None, 1
        if one is not None:
            grown = self.live + one.freed_once - one.before
            self.live += more * grown
            self._reach(max(one.peak, one.peak + (more - 1) * grown, one.last_peak + more * grown))

    def _reach(self, live: int) -> None:
        """Note bytes that are alive, for the counter's peak."""
        if self._pass is not None:
            self._pass.peak = max(self._pass.peak, live + self._pass.freed_once)
            self._pass.last_peak = max(self._pass.last_peak, live)
        else:
            self.peak = max(self.peak, live)
            self.passing_peak = max(self.passing_peak, live - self.landed)

    def _add(self, storage: torch.UntypedStorage, old: set[int]) -> int:
        """Count a storage among live bytes; its bytes where it is new."""
        key = storage._cdata
        if key in self._times_of or id(storage) in old:
            return 0
        size = storage.nbytes()
        self._times_of[key] = self.times
        self.live += size
        weakref.finalize(storage, self._free, key, size)
        return size

    def _free(self, key: int, size: int) -> None:
        times = self._times_of.pop(key)
        if self._pass is None:
            self.live -= times * size
        elif times == self.times:
            self.live -= size
        else:
            self.live -= times * size
            self._pass.freed_once += times * size


class EagerLiveBytes(LiveBytes):
    """`LiveBytes` where nothing is compiled. torch keeps its compiler out of modes by a wrapper around each call, which
    takes as long as the counting."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: the byte counter has nothing to keep out of compilation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs)


@dataclass
class _FirstPass:
    """The first of equal passes, which `LiveBytes` runs alone. `before`: bytes alive at its beginning. `peak`: most in
    it; `last_peak`: the same in a pass that frees what is the same for all of them, `freed_once` bytes."""

    before: int
    freed_once: int = 0
    peak: int = 0
    last_peak: int = 0


def begin_repeated(times: int) -> None:
    """Count bytes and FLOPs of what runs up to `end_repeated` as if it ran so many times, one pass after another, each
    on tensors of its own. In backward too: call it where autograd comes to what was made so. What counts is what counts
    now; the rest does not change."""
    for counter in _counters():
        counter.begin_repeated(times)


def end_repeated() -> None:
    """End what `begin_repeated` of the byte counter began, if it is not ended."""
    for counter in _counters():
        counter.end_repeated()


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, views are no operations for the byte counter."""
    begin_repeated(0)
    try:
        yield
    finally:
        end_repeated()


def count_walk(read: Iterable[tuple[Tensor, int]], written: Tensor) -> None:
    """Count the bytes of a walk over tensors, each so many times, into a new one that was made without it."""
    size = written.nbytes
    moved = size + sum(times * _walked(tensor) for tensor, times in read)
    for counter in _counters():
        counter.walk(moved, size)


def _walked(tensor: Tensor) -> int:
    """Bytes of a walk over a tensor; what is expanded is there once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _counters() -> list[MatmulCounter]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, MatmulCounter)]


def flops_of(gemms: Mapping[GemmKind, tuple[int, float]]) -> float:
    """FLOPs of all kinds together, as counted."""
    return sum(flops for _, flops in gemms.values())


def _kind(module: str, packet: Any, args: Any) -> GemmKind:
    """The kind of a counted matmul of these arguments; its weight is the last of them."""
    operands = [t for t in tensors_in(args) if t.is_floating_point() and t.dim() > 1]
    weight = operands[-1]
    if packet is _aten._grouped_mm and weight.dim() == 3:
        return GemmKind(module, weight.dtype, prod(weight.shape[1:]) ** 0.5, weight.shape[0])
    return GemmKind(module, weight.dtype, (prod(weight.shape[-2:]) if weight.dim() == 3 else weight.numel()) ** 0.5, 1)


def _is_linear(module: nn.Module) -> bool:
    """True if a module multiplies rows by one weight, so that its matmuls are counted as a linear layer's."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding)

"""Weight gradients that wait: backward computes what the layer before it needs at once, and weight gradients later.

Zero-bubble schedules of pipelines fill their idle time with them.

    queue = WeightGradientQueue()  # one per model or stage, given to its layers by `gradient_queues.attach`
    with queue.region():
        loss.backward()  # input gradients; weight gradients wait with what they are computed from
        queue.cut(0)  # what waits is micro-batch 0's
        ...
        queue.run(0)  # computes, and adds to the parameters' gradients as autograd would have

A layer asks in its backward pass whether the queue takes its weight. Outside of a region it takes none, nor does it
take what is no parameter itself (a weight that is computed from others) or is frozen: those gradients come as ever. A
part of a parameter that ranks share, which a layer computes with (`tensor_parts.computed_part`), stands for the
parameter. What waits reads no saved graph, so a checkpointed layer is recomputed once, and a queue holds no activations
but the operands of its matmuls. State is the object's own. Hooks of a parameter run when its late gradient is added;
autograd runs those behind the adding in the backward pass too, which has brought nothing.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.ops.base.tensor_parts import parameter_of, sharded_like
from tilewright.ops.base.transforms import in_func_transform


@dataclass(frozen=True)
class Waiting:
    """A weight gradient to come."""

    compute: Callable[[], Tensor]
    """Called once at most: what it reads has not been changed by then."""
    held: Sequence[Tensor]
    """What is in memory for its sake."""


@dataclass(eq=False)
class WeightGradientQueue:
    """Weight gradients of one model or stage that are still to be computed. Copies and pickles are empty and closed."""

    at_once: int = 0
    """Weight gradients in regions that did not wait: the weight is no parameter itself, or a caller wanted it back."""
    num_bytes: int = 0
    """Of all that is held, a storage counted once."""
    eagerly: Callable[..., Tensor] | None = None
    """Calls a function with arguments, where torch's compiler ends its graph: it knows nothing of what waits. Set by
    `precision.mixed.gradient_queues.attach`; its import takes a second."""
    _open: bool = False
    _paused: int = 0
    _now: deque[tuple[nn.Parameter, Waiting]] = field(default_factory=deque)
    """Since the last cut."""
    _cut: dict[int, deque[tuple[nn.Parameter, Waiting]]] = field(default_factory=dict)
    _built: int = 0
    _refs: Counter[int] = field(default_factory=Counter)
    """Address of a storage -> tensors held in it."""

    def owned_bytes(self) -> dict[str, int]:
        """Bytes of weight gradients in the queue, as activations, for `MemoryTracker.count_beside`."""
        return {"activations": self.num_bytes}

    @contextmanager
    def region(self) -> Iterator["WeightGradientQueue"]:
        """Inside, weight gradients wait in the queue. An exception drops them.

        Raises:
            ConfigError: some have not been computed at the end.
        """
        if self._open:
            raise AssertionError("a queue has one region at a time")
        self._open, self.at_once, self._built = True, 0, 0
        try:
            yield self
            if len(self):
                raise _left(len(self), sorted(self._cut))
        finally:
            self._open = False
            self.drop()

    def __len__(self) -> int:
        return len(self._now) + sum(map(len, self._cut.values()))

    def __bool__(self) -> bool:
        return True

    def may_take(self, weight: Tensor) -> bool:
        """True if the queue may take the gradient of this weight, which would wait, if backward were now."""
        param = parameter_of(weight)
        return self._open and not self._paused and param is not None and param.is_leaf

    def takes(self, weight: Tensor) -> bool:
        """True if the queue takes the gradient of this weight, which is to wait. Asked in backward, where it is wanted;
        counts."""
        wait = self.may_take(weight)
        self.at_once += self._open and not wait
        return wait

    def add(self, weight: Tensor, waiting: Waiting) -> None:
        """Let the gradient of a weight that the queue `takes` wait."""
        param = parameter_of(weight)
        if param is None:
            raise AssertionError("ask `takes` first")
        if isinstance(param, DTensor) and param is not weight:
            waiting = replace(waiting, compute=partial(_of_whole, waiting.compute, param))
        self._count(waiting, 1)
        self._now.append((param, waiting))

    def cut(self, micro_batch: int) -> None:
        """Close a micro-batch in the queue of weight gradients: all that waits since the last cut belongs to it."""
        if micro_batch in self._cut:
            raise AssertionError(f"micro-batch {micro_batch} has been cut and not run")
        self._cut[micro_batch], self._now = self._now, deque()

    def run(self, micro_batch: int) -> None:
        """Run the queue: compute the weight gradients of a micro-batch that was cut, in the order in which they came,
        and add each to its parameter's gradient: autograd's own adding, with its dtypes and hooks. What one held is
        free then."""
        queued = self._cut[micro_batch]
        while queued:
            param, waiting = queued.popleft()
            with torch.enable_grad():
                end = _Late.apply(param, waiting.compute)
            end.backward()
            self._count(waiting, -1)
            del end, waiting  # and with them what it held
        del self._cut[micro_batch]

    def builder(self) -> Callable[[], None]:
        """The queue of weight gradients as `dw_builder` of `torch.distributed.pipelining.PipelineStage`: cuts, and
        returns what runs it."""
        self._built += 1
        self.cut(-self._built)
        return partial(self.run, -self._built)

    def drop(self) -> None:
        """Drop the weight gradients that wait in the queue."""
        self._now.clear()
        self._cut.clear()
        self._refs.clear()
        self.num_bytes = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the queue of weight gradients is paused: for callers that take a layer's gradient themselves
        (`torch.autograd.grad`)."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _count(self, waiting: Waiting, change: int) -> None:
        for tensor in waiting.held:
            storage = tensor.untyped_storage()
            before = self._refs[storage.data_ptr()]
            self._refs[storage.data_ptr()] += change
            if not before or not before + change:
                self.num_bytes += change * storage.nbytes()

    def __reduce__(self) -> tuple[type["WeightGradientQueue"], tuple[()]]:
        return WeightGradientQueue, ()


class _Late(torch.autograd.Function):
    """Its gradient is computed when it is asked for, as the last backward of a graph that ends at the parameter."""

    @staticmethod
    def forward(ctx, param, compute):
        ctx.compute = compute
        return torch.zeros((), dtype=torch.float32, device=param.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        return ctx.compute(), None


def _of_whole(compute: Callable[[], Tensor], param: DTensor) -> Tensor:
    """The weight gradient from the queue of this rank's part, as that of the parameter."""
    return sharded_like(compute(), param.shape, param)


def _left(number: int, micro_batches: Sequence[int]) -> ConfigError:
    return ConfigError(
        "Weight gradients were not computed by the end of the step",
        got=f"{number} of them wait" + (f", of micro-batches {micro_batches} that were cut" if micro_batches else ""),
        need="each micro-batch's to be run in the region that its backward pass was in",
        try_="queue.cut(i) behind the backward pass of micro-batch i, and queue.run(i) before the region ends",
    )


def queue_now(layer: nn.Module) -> WeightGradientQueue | None:
    """The queue of a layer's weight gradients now, where its call is one of which backward may leave the weight's
    gradient for later: not in compiled code, in a `torch.func` transform, or without gradients."""
    queue = getattr(layer, "weight_queue", None)
    if queue is None or torch.compiler.is_compiling() or not torch.is_grad_enabled() or in_func_transform():
        return None
    return queue


def breaks_graph(layer: nn.Module) -> WeightGradientQueue | None:
    """The queue of weight gradients of a layer that is being compiled, and must be called by the queue's `eagerly`;
    else None."""
    queue = getattr(layer, "weight_queue", None)
    if queue is None or queue.eagerly is None or not torch.is_grad_enabled() or not torch.compiler.is_compiling():
        return None
    return queue


def queues_of(module: nn.Module) -> set[WeightGradientQueue]:
    """The queues of weight gradients of a module's layers."""
    queues = (getattr(part, "weight_queue", None) for part in module.modules())
    return {queue for queue in queues if queue is not None}

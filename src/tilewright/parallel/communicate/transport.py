"""Rows of bytes between ranks, on a process group of torch's; and the thread in which exchanges wait on a CPU.

`Transport` is what `AsyncCommunicator` needs of a group. Another one stands for a link of known speed in tests and
benchmarks.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """Exchanges between ranks, each through before it returns (on a GPU: in the order of its stream)."""

    rank: int
    size: int

    def all_to_all(self, rows_RB: Tensor) -> Tensor:
        """Exchange rows of bytes by all-to-all: row r goes to rank r; returns the rows that came, in the order of the
        ranks."""
        ...

    def all_gather(self, row_B: Tensor) -> Tensor:
        """Gather rows of bytes by all-gather: this rank's row goes to all; returns the rows of all ranks [R, B]."""
        ...

    def all_reduce(self, values: Tensor) -> None:
        """Sum a tensor over the ranks by all-reduce, in place, in torch's order."""
        ...


class GroupTransport:
    """Transport of rows of bytes over a process group of torch's.

    Args:
        group: of torch's, initialised.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_to_all(self, rows_RB: Tensor) -> Tensor:
        """Exchange rows among the ranks on a process group: see `Transport`."""
        found = torch.empty_like(rows_RB)
        dist.all_to_all_single(found, rows_RB.contiguous(), group=self.group)
        return found

    def all_gather(self, row_B: Tensor) -> Tensor:
        """Gather a row of each rank on a process group: see `Transport`."""
        found = row_B.new_empty(self.size * row_B.numel())  # flat: gloo takes no other shape
        all_gather_rows(found, row_B.contiguous().view(-1), group=self.group)
        return found.view(self.size, *row_B.shape)

    def all_reduce(self, values: Tensor) -> None:
        """Sum values over the ranks on a process group: see `Transport`."""
        dist.all_reduce(values, group=self.group)


def all_gather_rows(found: Tensor, own: Tensor, **options: Any) -> Any:
    """Gather tensors of one size into one by torch's all-gather, whose name depends on the version of torch."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(found, own, **options)


def reduce_scatter_rows(found: Tensor, whole: Tensor, **options: Any) -> Any:
    """Sum and divide one tensor by torch's reduce-scatter, whose name depends on the version of torch."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(found, whole, **options)


def own_group(group: dist.ProcessGroup, timeout: timedelta | None) -> dist.ProcessGroup:
    """A transport's own process group of the same ranks, which all call this: what a thread exchanges is apart from
    what others do."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is in it"
    return made


class ExchangeThread:
    """A thread that does one piece of work after another, in the order in which they came. It ends with its owner; what
    is under way in it is no reason for a process to stay."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        Thread(target=_work, args=(self._queue,), name="tilewright exchanges", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """Queue an exchange for the transport's thread; its result or its error comes later."""
        future: Future[Any] = Future()
        self._queue.put((work, future))
        return future


def _work(queue: "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]") -> None:
    while (task := queue.get()) is not None:
        work, future = task
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised by the thread that waits)
            future.set_exception(error)
        del task, work, future

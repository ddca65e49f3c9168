"""Decisions that all ranks take together: sums, flags and objects over a group. With a group of None, of one process,
each returns what it was given.

What rests on a local measurement or signal (a stop that one rank was asked for, memory that one rank lacks, a time)
differs from rank to rank. It is agreed on before it is acted on, or ranks wait for each other in different calls.
"""

import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.memory.tracking.byte_tables import is_out_of_memory

T = TypeVar("T")


def sum_over(group: dist.ProcessGroup | None, tensors: Sequence[Tensor]) -> None:
    """Add up each tensor over all ranks of the group, in place."""
    if group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def reduced_on(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device on which numbers of the host are reduced: the host, if the group has a backend for it, so that no
    device is waited for; else the given device."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(group) else device


def sum_of(group: dist.ProcessGroup | None, value: float, device: torch.device | str = "cpu") -> float:
    """Agree on the sum of a number over all ranks of the group, in FP64."""
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return float(total)


def any_of(group: dist.ProcessGroup | None, flag: bool, device: torch.device | str = "cpu") -> bool:
    """Agree on a flag: true on all ranks if it is set on any."""
    if group is None:
        return flag
    found = torch.tensor(int(flag), device=reduced_on(group, torch.device(device)))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found)


def from_first(group: dist.ProcessGroup | None, value: T | None) -> T:
    """Agree on the first rank's value, which pickles, on all. The others' is not looked at."""
    if group is None:
        assert value is not None
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Gather every rank's value for an agreement, which pickles, by rank."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def named_ranks(ranks: Collection[int]) -> str:
    """The numbers of ranks in words, for a user to read what they agree on.

    Example:
        >>> named_ranks([3]), named_ranks((0, 2))
        ('rank 3', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class OnAllRanksError(torch.OutOfMemoryError):
    """A rank found no memory; raised on all of them, which have all stopped at the same place."""


@contextmanager
def oom_on_all(
    group: dist.ProcessGroup | None, device: torch.device, before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Agree on out-of-memory: no rank waits for another inside; afterwards all continue, or none does.

    Args:
        group: ranks; None: the allocator's error is raised as it is.
        device: of what the ranks exchange.
        before: called on every rank before they agree, also on one that has found no memory: calls the collectives that
            were begun inside to their end.

    Raises:
        OnAllRanksError: an allocator found no memory on one of them.
    """
    if group is None:
        yield
        return
    said = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        traceback.clear_frames(error.__traceback__)  # they hold what was computed up to it
    before()
    if any_of(group, said is not None, device):
        raise OnAllRanksError("out of memory on another rank" if said is None else said)

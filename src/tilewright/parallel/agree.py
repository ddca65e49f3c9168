"""Decisions that all ranks take together: sums, flags and objects over a group. With a group of None, of one process,
each returns what it was given.

What rests on a local measurement or signal (a stop that one rank was asked for, memory that one rank lacks, a time)
differs from rank to rank. It is agreed on before it is acted on, or ranks wait for each other in different calls.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def sum_over(group: dist.ProcessGroup | None, tensors: Sequence[Tensor]) -> None:
    """Sum each tensor over the group, in place."""
    if group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)


def reduced_on(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where numbers that are on the host are reduced: there, if the group has a backend for it, so that no device is
    waited for; else on the given device."""
    return torch.device("cpu") if "cpu" in dist.get_backend_config(group) else device


def sum_of(group: dist.ProcessGroup | None, value: float, device: torch.device | str = "cpu") -> float:
    """The sum of a number over the group, in FP64."""
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return float(total)


def any_of(group: dist.ProcessGroup | None, flag: bool, device: torch.device | str = "cpu") -> bool:
    """Whether the flag is set on any rank."""
    if group is None:
        return flag
    found = torch.tensor(int(flag), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found)


def from_first(group: dist.ProcessGroup | None, value: T | None) -> T:
    """The first rank's value, which pickles, on all. The others' is not looked at."""
    if group is None:
        assert value is not None
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's value, which pickles, by rank."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found

"""Masters that follow writes to their weights. See `ops.adam`.

On a CPU a weight without a write costs what it takes to read it and its master: rounded and compared in pieces that
the cache holds. On other devices nothing is asked for that the host would wait for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 2**18
"""Elements that a thread compares at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def follow_writes(master: Tensor, weight: Tensor) -> None:
    """Give FP32 masters the values that others wrote to their 16-bit weights: the reference, see `ops.adam`."""
    if master.dtype == weight.dtype or not weight.numel():
        return
    if weight.device.type != "cpu":
        _take_over(master, weight)
        return
    if not weight.ndim:
        master, weight = master.view(1), weight.view(1)
    rows = max(1, PIECE * torch.get_num_threads() // max(1, weight[0].numel()))
    rounded = torch.empty_like(weight[:rows], memory_format=torch.contiguous_format)
    for some_master, some_weight in zip(master.split(rows), weight.split(rows), strict=True):
        part = rounded[: len(some_weight)].copy_(some_master)
        if _differ(part, some_weight):
            _take_over(some_master, some_weight)


class Follower:
    """Follows writes on a CPU, a piece after the other, in memory that is taken once: no call allocates.

    Args:
        pairs: masters and their weights, flat tensors of one dtype each: what calls will be given.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        longest = max((len(master) for master, _ in pairs), default=0)
        dtypes = (pairs[0][1].dtype, torch.bool, pairs[0][0].dtype) if pairs else ()
        self._rounded, self._as_stored, self._wide = (torch.empty(longest, dtype=dtype) for dtype in dtypes)

    def __call__(self, master_N: Tensor, weight_N: Tensor) -> None:
        """Let a master follow writes to its weight: see `ops.adam`."""
        rounded_N = self._rounded[: len(master_N)].copy_(master_N)
        if not _differ(rounded_N, weight_N):
            return
        bits = _BITS[weight_N.itemsize]
        as_stored_N = torch.eq(rounded_N.view(bits), weight_N.view(bits), out=self._as_stored[: len(master_N)])
        wide_N = self._wide[: len(master_N)].copy_(weight_N)
        torch.where(as_stored_N, master_N, wide_N, out=master_N)


def followed(master: Tensor, weight: Tensor) -> Tensor:
    """The master after it has followed writes; nothing is written."""
    bits = _BITS[weight.itemsize]
    as_stored = master.to(weight.dtype).view(bits) == weight.view(bits)
    return torch.where(as_stored, master, weight.to(master.dtype))


def _take_over(master: Tensor, weight: Tensor) -> None:
    master.copy_(followed(master, weight))


def _differ(rounded: Tensor, weight: Tensor) -> bool:
    """True if a bit differs, where writes are followed. Four numbers are compared as one where they lie side by
    side."""
    together = weight.is_contiguous() and not any(x.numel() % 4 or x.storage_offset() % 4 for x in (rounded, weight))
    if not together:
        bits = _BITS[weight.itemsize]
        return not torch.equal(rounded.view(bits), weight.view(bits))
    return not torch.equal(rounded.view(-1).view(torch.int64), weight.view(-1).view(torch.int64))

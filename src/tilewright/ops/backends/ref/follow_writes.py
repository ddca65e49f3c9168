"""Masters that follow writes to their weights. See `ops.adam`.

On a CPU a weight that nobody wrote costs what it takes to read it and its master: rounded and compared in pieces that
the cache holds. On other devices nothing is asked for that the host would wait for.
"""

import torch
from torch import Tensor

PIECE = 2**18
"""Elements that a thread compares at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def follow_writes(master: Tensor, weight: Tensor) -> None:
    """See `ops.adam`."""
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


def _take_over(master: Tensor, weight: Tensor) -> None:
    bits = _BITS[weight.itemsize]
    as_stored = master.to(weight.dtype).view(bits) == weight.view(bits)
    master.copy_(torch.where(as_stored, master, weight.to(master.dtype)))


def _differ(rounded: Tensor, weight: Tensor) -> bool:
    """Whether a bit differs. Four numbers are compared as one where they lie side by side."""
    together = weight.is_contiguous() and not any((x.numel() | x.storage_offset()) % 4 for x in (rounded, weight))
    if not together:
        bits = _BITS[weight.itemsize]
        return bool((rounded.view(bits) != weight.view(bits)).any())
    wide, stored = rounded.view(-1).view(torch.int64), weight.view(-1).view(torch.int64)
    return bool((wide != stored).any())

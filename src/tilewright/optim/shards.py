"""What this rank holds of sharded tensors, and tensors that are sharded like others.

AdamW treats elements one by one, so shards are updated where they are. What is rounded needs two things more: random
bits that an element has wherever it is, and blocks of codes that no shard cuts. Both hold where a shard is a range of
rows: `Shard(0)`, as FSDP2 has it, and `Replicate`.
"""

import functools
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@torch.no_grad()
def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """What this rank holds of a tensor, in the same memory; a whole tensor as it is.

    Args:
        tensor: whole or sharded.
        like: a tensor of its shape, whose sharding it gets before: that of a gradient may be another, or a sum that is
            still to be taken. All ranks wait for each other then.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(like, DTensor) and (tensor.device_mesh, tensor.placements) != (like.device_mesh, like.placements):
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    held = tensor.to_local()
    return held.wait() if isinstance(held, AsyncCollectiveTensor) else held


def holds_rows(tensor: DTensor) -> bool:
    """Whether each rank holds a range of rows, or all of them."""
    # A shard of FSDP over tensor parallelism is a kind of its own, whose rows are not one range.
    return all(type(placement) is Replicate or placement == Shard(0) for placement in tensor.placements)


def first_element(tensor: Tensor) -> int:
    """Elements of the whole tensor before those of this rank's rows."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return 0
    _, (first, *_) = _part(tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements))
    return first * prod(tensor.shape[1:])


def zeros_beside(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Zeros with this rank's part of `shape` where `like` is whole or holds rows of as many as it has itself."""
    if not isinstance(like, DTensor):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    part, _ = _part(tuple(shape), like.device_mesh, tuple(like.placements))
    values = torch.zeros(part, dtype=dtype, device=local(like.detach()).device)
    return sharded_like(values, shape, like)


def sharded_like(part: Tensor, shape: Sequence[int], like: DTensor) -> DTensor:
    """A tensor of this shape of which this rank holds `part`, sharded like another."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, were it sharded like another of as many rows; a view."""
    if not isinstance(like, DTensor):
        return whole
    sizes, begins = _part(tuple(whole.shape), like.device_mesh, tuple(like.placements))
    return whole[tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))]


def beside(value: Tensor, param: Tensor) -> Tensor:
    """A state on its parameter's device and sharded like it: what is whole is cut, which no rank waits for."""
    if isinstance(param, DTensor) and not isinstance(value, DTensor):
        part = part_of(value, param).to(local(param.detach()).device, copy=True, memory_format=torch.contiguous_format)
        return sharded_like(part, value.shape, param)
    return value.to(param.device)


@functools.lru_cache(maxsize=4096)  # asked for in every step
def _part(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part, and where it begins."""
    return compute_local_shape_and_global_offset(shape, mesh, placements)

"""This rank's part of a tensor: of a DTensor its shard, of any other tensor the whole."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Place = tuple[str, tuple[int, ...] | None]
"""A tensor's name, and where in it the part begins; None for a tensor that every rank holds whole."""


def local_part(tensor: Tensor) -> Tensor:
    """The part that this rank holds, which shares the tensor's memory. Empty where the ranks outnumber the rows."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def place_of(name: str, tensor: Tensor) -> Place:
    """The place of this rank's part. Ranks whose parts have the same place hold the same part."""
    if not isinstance(tensor, DTensor):
        return name, None
    (chunk,) = tensor.__create_chunk_list__()
    return name, tuple(chunk.offsets)

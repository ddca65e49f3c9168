"""Graphs that outlive the memory of the parameters that they were made with.

A layer group that is stored off the device has other memory each time it is fetched. What autograd saves of a weight is
often a view of it, into a buffer that holds another layer group by the time of the backward pass. Inside of
`rebind_saved_views` such a view is saved as its place in the parameter, and made again, from where the parameter is
then, when backward wants it.

    with rebind_saved_views(part.params):
        out = layer(x)
    ...                             # the layer group leaves, and comes back somewhere else
    out.backward(grad)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _SavedView:
    """A view of memory that a parameter is in."""

    param: Tensor
    distance: int
    """Bytes from the parameter's first to the view's."""
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@contextmanager
def rebind_saved_views(params: Sequence[Tensor]) -> Iterator[None]:
    """Let graphs that are made inside hold nothing of the memory that these parameters have now.

    Args:
        params: live, now and when backward runs through the graphs. Those that share memory are in it at the same
            distances then.
    """
    owners = {param.untyped_storage().data_ptr(): param for param in params if param.numel()}

    def pack(saved: Tensor) -> Tensor | _SavedView:
        if saved.layout != torch.strided or not saved.numel():
            return saved
        param = owners.get(saved.untyped_storage().data_ptr())
        if param is None:
            return saved
        distance = int(saved.storage_offset()) * saved.itemsize - int(param.storage_offset()) * param.itemsize
        return _SavedView(param, distance, saved.size(), saved.stride(), saved.dtype)

    def unpack(saved: Tensor | _SavedView) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        param = saved.param.detach()
        start = param.storage_offset() * param.itemsize + saved.distance
        empty = torch.empty(0, dtype=saved.dtype, device=param.device)
        return empty.set_(param.untyped_storage(), start // saved.dtype.itemsize, saved.size, saved.stride)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield

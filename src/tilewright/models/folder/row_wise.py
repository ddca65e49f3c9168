"""A tensor that is computed from stored ones, known without their bytes and read row by row.

    q = Recorded.stored("wqkv", (96, 32)).chunk(3)[0]   # any torch code: only shapes are computed
    read_rows(q, 8, 16, read)                           # reads rows 8 to 15 of "wqkv"

Stacking, concatenating, splitting and transposing are followed back to the rows of the stored tensors, as far as rows
stay rows: to dimensions behind the first, and along the first one where pieces are put together or cut. Rows of
anything else (the first dimension transposed or permuted, arithmetic) are cut from the whole, of one tensor at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Read = Callable[[str, int, int], Tensor]
"""Reads rows of a stored tensor: name, first row, last row + 1."""


@dataclass(frozen=True)
class _Call:
    """The function that gave a tensor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int
    """Of the tensor among the outputs."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of all outputs."""

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Get an argument of a call that is replayed row-wise."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


class Recorded(Tensor):
    """A tensor on the meta device that knows how it is computed from stored ones."""

    made: "_Call | str"
    """A call, or the name of a stored tensor."""

    @classmethod
    def stored(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> "Recorded":
        """A tensor of the meta device that stands for a stored one, recorded to be computed row-wise."""
        tensor = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        tensor.made = name
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = super().__torch_function__(func, types, args, kwargs)
        known = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Recorded)}
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Recorded)]
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
            raise ValueError(f"{name} changes a tensor that is not there yet")
        sizes = tuple(tuple(leaf.shape) for leaf in outs)
        for index, leaf in enumerate(outs):
            if id(leaf) not in known:
                leaf.made = _Call(func, args, kwargs, index, sizes)
        return out


def read_rows(tensor: Recorded, start: int, stop: int, read: Read) -> Tensor:
    """Read row-wise: rows `start` to `stop` - 1 of a tensor that is computed from stored ones.

    Args:
        tensor: of at least one dimension.
        start, stop: within it.
        read: asked for the rows of stored tensors that these are made from.
    """
    call = tensor.made
    if isinstance(call, str):
        return read(call, start, stop)
    by_rows = _BY_ROWS.get(call.func)
    rows = by_rows(call, start, stop, read) if by_rows is not None else None
    return _whole(tensor, read)[start:stop] if rows is None else rows


def _whole(tensor: Recorded, read: Read) -> Tensor:
    if isinstance(tensor.made, str):
        return read(tensor.made, 0, len(tensor) if tensor.ndim else 0)
    call = tensor.made
    args, kwargs = tree_map(lambda x: _whole(x, read) if isinstance(x, Recorded) else x, (call.args, call.kwargs))
    return tree_leaves(call.func(*args, **kwargs))[call.index]


# ---- functions that keep rows together: each gives rows, or None where it does not here ----


def _stack(call: _Call, start: int, stop: int, read: Read) -> Tensor | None:
    tensors, dim = call.get(0, "tensors"), call.get(1, "dim", 0) % len(call.sizes[0])
    if dim == 0:
        return torch.stack([_whole(tensor, read) for tensor in tensors[start:stop]])
    return torch.stack([read_rows(tensor, start, stop, read) for tensor in tensors], dim)


def _cat(call: _Call, start: int, stop: int, read: Read) -> Tensor | None:
    tensors, dim = call.get(0, "tensors"), call.get(1, "dim", 0) % len(call.sizes[0])
    if dim:
        return torch.cat([read_rows(tensor, start, stop, read) for tensor in tensors], dim)
    pieces, first = [], 0
    for tensor in tensors:
        begin, end = max(start - first, 0), min(stop - first, len(tensor))
        if begin < end:
            pieces.append(read_rows(tensor, begin, end, read))
        first += len(tensor)
    return torch.cat(pieces)


def _pieces(call: _Call, start: int, stop: int, read: Read) -> Tensor | None:
    tensor, dim = call.get(0, "tensor", call.kwargs.get("input")), call.get(2, "dim", 0) % len(call.sizes[0])
    if dim:
        args, kwargs = call.args[1:], {k: v for k, v in call.kwargs.items() if k not in ("tensor", "input")}
        return call.func(read_rows(tensor, start, stop, read), *args, **kwargs)[call.index]
    first = sum(shape[0] for shape in call.sizes[: call.index])
    return read_rows(tensor, first + start, first + stop, read)


def _same(call: _Call, start: int, stop: int, read: Read) -> Tensor | None:
    return read_rows(call.get(0, "input"), start, stop, read)


def _transpose(call: _Call, start: int, stop: int, read: Read) -> Tensor | None:
    dims = [call.get(1, "dim0") % len(call.sizes[0]), call.get(2, "dim1") % len(call.sizes[0])]
    if 0 in dims:
        return None
    return read_rows(call.get(0, "input"), start, stop, read).transpose(*dims)


def _reshape(call: _Call, start: int, stop: int, read: Read) -> Tensor | None:
    tensor, (shape,) = call.get(0, "input"), call.sizes
    if not shape or tensor.ndim == 0 or len(tensor) != shape[0]:
        return None
    return read_rows(tensor, start, stop, read).reshape(stop - start, *shape[1:])


_BY_ROWS: dict[Any, Callable[[_Call, int, int, Read], Tensor | None]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    **dict.fromkeys((torch.chunk, Tensor.chunk, torch.split, Tensor.split), _pieces),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone, Tensor.detach), _same),
    **dict.fromkeys((torch.transpose, Tensor.transpose), _transpose),
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view, torch.squeeze, Tensor.squeeze), _reshape),
}

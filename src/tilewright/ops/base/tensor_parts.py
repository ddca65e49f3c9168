"""Which part of a tensor a rank holds, and tensors that are in parts like others. All that is asked about it is here.

A part is a block: a range of indices along each dim. FSDP2 gives ranges of rows, tensor parallelism ranges of rows or
columns, and FSDP2 over either the rows of these; where several axes of the mesh cut the same dim they must come out
even, since a part of what is left over may be no block.

AdamW treats elements one by one, so parts are updated where they are. What is rounded needs two things more: random
bits that an element has wherever it is (`numbering`), and blocks of codes that nothing cuts: those of whole rows, and
those of equal parts by columns that are multiples of a block.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tilewright.core.errors import ConfigError

Place = tuple[str, tuple[int, ...] | None]
"""A tensor's name, and where in it the part begins; None for a tensor that every rank holds whole."""


@dataclass(frozen=True)
class TensorPart:
    """A block of a tensor.

    Example:
        >>> part = TensorPart((6, 8), (2, 0), (2, 8))
        >>> part.is_rows, part.first_element, TensorPart((6, 8), (0, 4), (6, 4)).is_rows
        (True, 16, False)
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""
    starts: tuple[int, ...]
    """First index along each dim."""
    sizes: tuple[int, ...]
    """Its own shape."""

    @staticmethod
    def of_rows(shape: Sequence[int], rows: range) -> "TensorPart":
        """The part of a tensor that is some whole rows."""
        return TensorPart(tuple(shape), (0,) * len(shape), tuple(shape)).some_rows(rows)

    def some_rows(self, rows: range) -> "TensorPart":
        """The block of some rows of this part of a tensor."""
        return TensorPart(self.shape, (self.starts[0] + rows.start, *self.starts[1:]), (len(rows), *self.sizes[1:]))

    @property
    def rows(self) -> range:
        """The indices along the whole tensor's first dim that this part covers."""
        return range(self.starts[0], self.starts[0] + self.sizes[0])

    @property
    def is_rows(self) -> bool:
        """True if a tensor's part is rows: they are whole."""
        return self.sizes[1:] == self.shape[1:]

    @property
    def first_element(self) -> int:
        """The number of elements of the whole tensor before this part."""
        return sum(start * prod(self.shape[dim + 1 :]) for dim, start in enumerate(self.starts))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that cut a part out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


def rows_of(rows: int, count: int, number: int) -> range:
    """Rows of a tensor's part, one of `count` parts, as `Shard(0)` has them: the last have fewer, or none, where they
    do not come out even.

    Example:
        >>> [rows_of(5, 4, number) for number in range(4)]
        [range(0, 2), range(2, 4), range(4, 5), range(5, 5)]
    """
    each = -(-rows // count)
    return range(min(rows, number * each), min(rows, (number + 1) * each))


def part_of(tensor: Tensor) -> TensorPart:
    """The part of a tensor that this rank holds; of one that is no DTensor, all.

    Raises:
        ConfigError: several axes of the mesh cut the same dim, and do not come out even.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return TensorPart(shape, (0,) * len(shape), shape)
    uneven = _uneven_dim(shape, tensor.device_mesh, tensor.placements)
    if uneven is not None:
        raise ConfigError(
            "Tensor that several axes of the mesh cut unevenly",
            got=f"shape {shape}, placements {tensor.placements}, a mesh of {tuple(tensor.device_mesh.shape)}",
            need=f"a dim {uneven} that divides by the number of its parts: what is left over may be no range of it",
            try_="other numbers of processes along these axes, or one axis for this tensor",
        )
    return _part(shape, tensor.device_mesh, tuple(tensor.placements))


def local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory; a whole tensor as it is.

    Args:
        tensor: whole or sharded.
        like: a tensor of its shape, whose sharding it gets before: that of a gradient may be another, or a sum that is
            still to be taken. All ranks wait for each other then.
    """
    return _held(tensor, like) if isinstance(tensor, DTensor) else tensor  # most are whole, and ask for nothing more


@torch.no_grad()
def _held(tensor: DTensor, like: Tensor | None) -> Tensor:
    if isinstance(like, DTensor) and (tensor.device_mesh, tensor.placements) != (like.device_mesh, like.placements):
        tensor = tensor.redistribute(like.device_mesh, like.placements)
    held = tensor.to_local()
    return held.wait() if isinstance(held, AsyncCollectiveTensor) else held


def computed_part(param: DTensor) -> Tensor:
    """The part of a parameter that this rank holds, as a plain tensor for a layer that computes with it. `parameter_of`
    finds the parameter, as long as nothing has been made of the part.

    Where a parameter's gradient is wider than itself the part is a leaf, whose gradient is added to the parameter's:
    autograd would round that of a tensor that was made of another to its dtype.
    """
    wide = param.requires_grad and param.grad_dtype not in (None, param.dtype) and torch.is_grad_enabled()
    part = _wide_leaf(param) if wide else param.to_local()
    part.whole = param  # type: ignore[attr-defined]
    return part


def _wide_leaf(param: DTensor) -> Tensor:
    leaf = param.detach().to_local().requires_grad_()  # pyright: ignore[reportAttributeAccessIssue]  # a DTensor
    leaf.grad_dtype = param.grad_dtype
    leaf.register_post_accumulate_grad_hook(functools.partial(_add_gradient, param))
    return leaf


@torch.no_grad()
def _add_gradient(param: DTensor, leaf: Tensor) -> None:
    """Add the gradient of a tensor's part to that of its parameter."""
    grad, leaf.grad = leaf.grad, None
    if grad is None:
        return  # it waits: `weight_gradient_queue` adds it to the parameter's itself
    if param.grad is None:
        param.grad = sharded_like(grad, param.shape, param)
    else:
        local(param.grad).add_(grad)


def parameter_of(weight: Tensor) -> nn.Parameter | None:
    """The parameter that a weight is, or that it is this rank's `computed_part` of; None of what is computed from
    others.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> parameter_of(weight) is weight, parameter_of(2 * weight)
        (True, None)
    """
    found = getattr(weight, "whole", weight)  # first: torch lets the part of a parameter say that it is one
    return found if isinstance(found, nn.Parameter) else None


def place_of(name: str, tensor: Tensor) -> Place:
    """The place of this rank's part of a tensor. Ranks whose parts have the same place hold the same part.

    Raises:
        ConfigError: see `part_of`.
    """
    return name, part_of(tensor).starts if isinstance(tensor, DTensor) else None


def holds_rows(tensor: Tensor) -> bool:
    """True if parts of a tensor are rows: each rank holds one range of whole rows, or all of them."""
    if not isinstance(tensor, DTensor):
        return True
    cuts = _cuts(tensor.device_mesh, tensor.placements)
    return set(cuts) <= {0} and _uneven_dim(tuple(tensor.shape), tensor.device_mesh, tensor.placements) is None


def columns_cut(tensor: Tensor) -> int | None:
    """The number of parts that a matrix is cut into along its columns, where each rank holds a block of rows and
    columns; None of any other part. 1: whole rows."""
    if not isinstance(tensor, DTensor) or holds_rows(tensor):
        return 1
    cuts = _cuts(tensor.device_mesh, tensor.placements)
    even = _uneven_dim(tuple(tensor.shape), tensor.device_mesh, tensor.placements) is None
    return prod(cuts.get(1, ())) if tensor.ndim == 2 and set(cuts) <= {0, 1} and even else None


def num_cuts(tensor: Tensor) -> int:
    """The axes of the mesh along which ranks hold different parts of a tensor."""
    return sum(map(len, _cuts(tensor.device_mesh, tensor.placements).values())) if isinstance(tensor, DTensor) else 0


def numbering(tensor: Tensor) -> tuple[int, int]:
    """How this rank's part of a tensor is numbered in the whole: how many elements come before the first, and how many
    between two rows. Zeros if it holds no block of rows and columns: nothing is rounded then (`optim.validate`)."""
    if columns_cut(tensor) is None:
        return 0, 0
    part = part_of(tensor)
    return part.first_element, 0 if part.is_rows or len(part.sizes) < 2 else part.shape[1] - part.sizes[1]


def zeros_beside(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Make zeros of `shape` that are cut like the tensor `like`: this rank's part, if `like` is whole or holds rows of
    as many as it has itself."""
    if not isinstance(like, DTensor):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    held = local(like.detach())
    alike = tuple(shape) == tuple(like.shape)  # then whatever it holds
    sizes = held.shape if alike else _part(tuple(shape), like.device_mesh, tuple(like.placements)).sizes
    return sharded_like(torch.zeros(sizes, dtype=dtype, device=held.device), shape, like)


def sharded_like(part: Tensor, shape: Sequence[int], like: DTensor) -> DTensor:
    """A tensor's part as a tensor of this shape, of which this rank holds `part`, sharded like another."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def cut_like(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, were it sharded like another of as many rows; a view."""
    if not isinstance(like, DTensor):
        return whole
    return whole[_part(tuple(whole.shape), like.device_mesh, tuple(like.placements)).slices]


def beside(value: Tensor, param: Tensor) -> Tensor:
    """Put a state on a parameter's device, sharded like it. A whole state is cut, without waiting for another rank."""
    if isinstance(param, DTensor) and not isinstance(value, DTensor):
        part = cut_like(value, param).to(local(param.detach()).device, copy=True, memory_format=torch.contiguous_format)
        return sharded_like(part, value.shape, param)
    return value.to(param.device)


def _cuts(mesh: DeviceMesh, placements: Sequence[Placement]) -> dict[int, list[int]]:
    """The dims of a tensor that axes of the mesh cut, each with the numbers of ranks along them."""
    found: dict[int, list[int]] = {}
    for size, placement in zip(mesh.shape, placements, strict=True):
        if type(placement) is not Replicate and not placement.is_partial():
            cut = cast(Shard, placement)  # or what FSDP2 makes of it
            found.setdefault(cut.dim, []).append(size)
    return found


def _uneven_dim(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> int | None:
    """A dim of a tensor's parts that several axes cut without coming out even. FSDP2 cuts what tensor parallelism has
    left to each rank: torch's metadata of such parts are wrong (pytorch#168134)."""
    cuts = _cuts(mesh, placements)
    return next((dim for dim, sizes in cuts.items() if len(sizes) > 1 and shape[dim] % prod(sizes)), None)


@functools.lru_cache(maxsize=4096)  # asked for in every step
def _part(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> TensorPart:
    sizes, starts = compute_local_shape_and_global_offset(shape, mesh, placements)
    return TensorPart(shape, tuple(starts), tuple(sizes))

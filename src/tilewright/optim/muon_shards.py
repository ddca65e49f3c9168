"""Directions of sharded matrices: each matrix goes to one rank, which runs Newton-Schulz for all.

Matrices are taken in rounds of as many as there are ranks, largest first, so that those of a round take about as long.
In a round each rank gets the parts of one matrix from all others, in BF16, and sends the parts of its direction back.
So a rank sends and receives 4 bytes per element that it holds, and runs one of the round's matrices. Were all to gather
all matrices, they would receive about 2 bytes per element of the whole matrix, and each run all of them: at 8 ranks 4
times the bytes and 8 times the matmuls. The bits are the same either way, and those of a matrix that is not sharded.

Where several axes of the mesh cut a matrix (FSDP2 over tensor parallelism), its parts are joined along one axis after
the other, outermost first, each time on one rank of the axis: 4 bytes per element and axis.

Legend: R rows of a matrix  C columns.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tilewright.ops.base.tensor_parts import rows_of
from tilewright.ops.kernels import Kernels

Axes = tuple[tuple[dist.ProcessGroup, int], ...]
"""Along each axis of the mesh that cuts a matrix: the ranks, and how many they are. Outermost first."""
Cut = tuple[int, ...]
"""The dim that each axis cuts."""


def axes_of(param: Tensor) -> tuple[Axes, Cut]:
    """The axes along which ranks hold shards of a Muon matrix, and how it is cut; none if this rank holds all of it, or
    whole matrices of a stack."""
    if not isinstance(param, DTensor) or param.ndim != 2:
        return (), ()
    found = [
        ((param.device_mesh.get_group(axis), param.device_mesh.size(axis)), cast(Shard, placement).dim)
        for axis, placement in enumerate(param.placements)
        if type(placement) is not Replicate and param.device_mesh.size(axis) > 1
    ]
    return tuple(axis for axis, _ in found), tuple(dim for _, dim in found)


def rounds(params: Sequence[DTensor], axes: Axes) -> Iterator[list[int]]:
    """Divide sharded matrices into Muon's rounds: indices of the matrices of each, the same on all ranks."""
    order = sorted(range(len(params)), key=lambda index: -params[index].numel())  # stable
    size = prod(size for _, size in axes)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def directions(
    parts_RC: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    cuts: Sequence[Cut],
    num_steps: int,
    axes: Axes,
    kernels: Kernels,
    like: Tensor | None = None,
) -> list[Tensor]:
    """Compute Muon's directions for sharded matrices: this rank's part of each.

    Args:
        parts_RC: this rank's part of each matrix of a round, BF16.
        shapes: of the whole matrices.
        cuts: how each is cut, by axis.
        num_steps: iterations.
        axes: the ranks, which all call this.
        kernels: implementations, the same on all ranks.
        like: of the parts' dtype and device, where this rank has none.
    """
    if not axes:
        return [kernels.newton_schulz(part.device.type)(part, num_steps).contiguous() for part in parts_RC]
    # 1. Matrix i goes to rank i of the outermost axis: this rank sends its parts and gets all parts of its own.
    (group, size), rest = axes[0], axes[1:]
    dealt = [range(rank, len(parts_RC), size) for rank in range(size)]
    mine = dealt[dist.get_rank(group)]
    pieces = [_pieces(shapes[index], cuts[index], size, rest) for index in mine]
    sent = [sum(parts_RC[index].numel() for index in of_rank) for of_rank in dealt]
    received = [sum(prod(piece[rank]) for piece in pieces) for rank in range(size)]
    like = parts_RC[0] if like is None else like
    flat = _flat([parts_RC[index] for of_rank in dealt for index in of_rank], like)
    got = flat.new_empty(sum(received))
    dist.all_to_all_single(got, flat, received, sent, group=group)
    # 2. Parts are joined along this axis; the other axes may still cut the result, which is joined there in turn.
    sizes = [piece[rank] for rank in range(size) for piece in pieces]
    blocks = [block.view(shape) for block, shape in zip(got.split(list(map(prod, sizes))), sizes, strict=True)]
    joined = [torch.cat(blocks[place :: len(mine)], cuts[index][0]) for place, index in enumerate(mine)]
    inner = [shapes[index] for index in mine], [cuts[index][1:] for index in mine]
    found = directions(joined, *inner, num_steps, rest, kernels, like)
    # 3. The directions go back as the parts came, with sizes sent and received exchanged.
    back = [
        whole.split([piece[rank][cuts[index][0]] for rank in range(size)], cuts[index][0])
        for whole, piece, index in zip(found, pieces, mine, strict=True)
    ]
    dist.all_to_all_single(
        flat, _flat([whole[rank] for rank in range(size) for whole in back], like), sent, received, group=group
    )
    order = [index for of_rank in dealt for index in of_rank]
    ends = dict(zip(order, flat.split([parts_RC[index].numel() for index in order]), strict=True))
    return [ends[index].view(part.shape) for index, part in enumerate(parts_RC)]


def _pieces(shape: torch.Size, cut: Cut, size: int, rest: Axes) -> list[tuple[int, ...]]:
    """The shapes of a matrix's parts on the ranks of the first axis, within what the other axes leave of it."""
    left = list(shape)
    for dim, (_, others) in zip(cut[1:], rest, strict=True):
        left[dim] //= others  # even where several axes cut
    parts = [len(rows_of(left[cut[0]], size, rank)) for rank in range(size)]
    return [tuple(part if dim == cut[0] else of for dim, of in enumerate(left)) for part in parts]


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)

"""Directions of sharded matrices: each matrix goes to one rank, which runs Newton-Schulz for all.

Matrices are taken in rounds of as many as there are ranks, largest first, so that those of a round take about as long.
In a round rank i gets the rows of the i-th matrix from all others, in BF16, and sends the rows of its direction back.
So a rank sends and receives 4 bytes per element that it holds, and runs one of the round's matrices. Were all to gather
all matrices, they would receive about 2 bytes per element of the whole matrix, and each run all of them: at 8 ranks 4
times the bytes and 8 times the matmuls. The bits are the same either way, and those of a matrix that is not sharded.

Legend: R rows of a matrix  C columns.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tilewright.ops.base.parts import rows_of
from tilewright.ops.kernels import Kernels

Axis = tuple[dist.ProcessGroup, int]
"""The ranks that share a matrix, and how many they are."""


def axis_of(param: Tensor) -> Axis | None:
    """The ranks that hold this matrix's rows; None where this one holds all of it, or whole matrices of a stack."""
    if not isinstance(param, DTensor) or param.ndim != 2:
        return None
    for axis, placement in enumerate(param.placements):
        size = param.device_mesh.size(axis)
        if isinstance(placement, Shard) and size > 1:
            return param.device_mesh.get_group(axis), size
    return None


def rounds(params: Sequence[DTensor], size: int) -> Iterator[list[int]]:
    """Indices of the matrices of each round, the same on all ranks."""
    order = sorted(range(len(params)), key=lambda index: -params[index].numel())  # stable
    for start in range(0, len(order), size):
        yield order[start : start + size]


def directions(
    parts_RC: Sequence[Tensor], shapes: Sequence[torch.Size], num_steps: int, axis: Axis, kernels: Kernels
) -> list[Tensor]:
    """This rank's rows of each direction.

    Args:
        parts_RC: this rank's rows of each matrix of a round, BF16.
        shapes: of the whole matrices.
        num_steps: iterations.
        axis: the ranks, which all call this.
        kernels: implementations, the same on all ranks.
    """
    group, size = axis
    rank = dist.get_rank(group)
    mine = shapes[rank] if rank < len(shapes) else torch.Size((0, 0))
    sent = [part.numel() for part in parts_RC] + [0] * (size - len(parts_RC))
    received = [len(rows_of(mine[0], size, number)) * mine[1] for number in range(size)]
    flat = torch.cat([part.reshape(-1) for part in parts_RC])
    whole = flat.new_empty(mine.numel())
    dist.all_to_all_single(whole, flat, received, sent, group=group)
    whole = kernels.newton_schulz(whole.device.type)(whole.view(mine), num_steps).contiguous()
    dist.all_to_all_single(flat, whole.view(-1), sent, received, group=group)
    return [piece.view(part.shape) for piece, part in zip(flat.split(sent), parts_RC, strict=False)]

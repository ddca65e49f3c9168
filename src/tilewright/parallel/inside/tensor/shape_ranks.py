"""Stand-ins for the other ranks of `tp` where there is no process group: for shapes, of which plans are made."""

import torch
from torch import Tensor
from torch import distributed as dist

from tilewright.parallel.inside.tensor.collectives import TensorRanks
from tilewright.parallel.world import Group


class ShapeRanks(TensorRanks):
    """Tensor-parallel ranks on which only shapes count: the first of so many. What others would send has its shape, and
    no meaning."""

    @staticmethod
    def of_size(size: int) -> "ShapeRanks":
        """The first of a number of tensor-parallel ranks, for shapes.

        Example:
            >>> ShapeRanks.of_size(2).gathered(torch.ones(3, 4)).shape
            torch.Size([3, 8])
        """
        return ShapeRanks(Group(0, size))

    def stacked(self, x: Tensor) -> Tensor:
        """A tensor of each rank, stacked, for shapes: see `TensorRanks`."""
        return x.new_empty(self.size, *x.shape)

    def scattered(self, x_R: Tensor) -> Tensor:
        """A rank's part of a sum, for shapes: see `TensorRanks`."""
        return x_R.new_empty(x_R.shape[1:])

    def _reduced(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def _columns(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, -1)

    def _all(self, x_nD: Tensor, num_rows: int) -> Tensor:
        each = -(-num_rows // self.size)
        return x_nD.new_empty(each * self.size, *x_nD.shape[1:])[:num_rows]

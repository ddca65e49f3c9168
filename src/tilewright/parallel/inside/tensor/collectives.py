"""Exchanges between ranks that hold other parts of a matrix, forward and backward.

| | forward | backward |
|---|---|---|
| `spread` | nothing: each rank has the input | the sum over ranks, of each of which the gradient is a part |
| `joined` | the sum over ranks | nothing: each rank has the gradient of the sum |
| `gathered` | the columns of all ranks | this rank's columns |
| `own_columns` | this rank's columns of what all have | the columns of all ranks |
| `own_rows` | this rank's rows of what all have | the rows of all ranks |
| `all_rows` | the rows of all ranks | this rank's rows of a gradient that all have |

A matrix cut by rows of its weight (outputs) stands between `spread` and the next one, cut by columns of its weight
(inputs), before `joined`. What is between them differs between ranks; all else is the same on each, and so are its
gradients. All ranks have the bits of one sum: a reduction is sent to all of them. Rows are shared as `Shard(0)` has
them: the last ranks have fewer, or none, where they do not come out even.

See: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tilewright.formats.tiled import WithCopies
from tilewright.ops.base.tensor_parts import rows_of
from tilewright.parallel.communicate.traffic import Operation, TrafficCounter, whole_bytes, wire_name
from tilewright.parallel.communicate.transport import all_gather_rows, reduce_scatter_rows
from tilewright.parallel.world import Group, World

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that hold other parts of the same matrices, and their exchanges forward and backward."""

    group: Group
    traffic: TrafficCounter = field(default_factory=TrafficCounter, compare=False)

    def __deepcopy__(self, _: object) -> Self:
        """The tensor-parallel ranks of a model's copy, which are the same."""
        return self

    @staticmethod
    def of(world: World) -> "TensorRanks":
        """The tensor-parallel ranks of a run."""
        return TensorRanks(world.tensor, world.traffic)

    @property
    def rank(self) -> int:
        """This rank's number among those of a tensor-parallel exchange, that hold parts of the same matrices."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks of a tensor-parallel exchange, that hold parts of the same matrices."""
        return self.group.size

    @overload
    def spread(self, x: Tensor) -> Tensor: ...

    @overload
    def spread(self, x: WithCopies) -> WithCopies: ...

    def spread(self, x: Tensor | WithCopies) -> Tensor | WithCopies:
        """Pass x [...], the same on all ranks, to layers of which each rank has a part; backward sums its gradient. Its
        8-bit copies stay as they are."""
        if isinstance(x, WithCopies):
            return x._replace(value=moved(x.value, _same, self._sum))
        return moved(x, _same, self._sum)

    def joined(self, x: Tensor) -> Tensor:
        """Sum x [...] over the tensor-parallel ranks, in its dtype."""
        return moved(x, self._sum, _same)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather x [..., M] of each tensor-parallel rank, in the order of ranks: [..., M * ranks]."""
        columns = x.shape[-1]
        return moved(x, self._columns, lambda grad: grad.narrow(-1, self.rank * columns, columns))

    def own_columns(self, x: Tensor) -> Tensor:
        """This tensor-parallel rank's columns of x [..., M * ranks], which is the same on all ranks, as its gradient
        will be."""
        columns = x.shape[-1] // self.size
        return moved(x, lambda x: x.narrow(-1, self.rank * columns, columns), self._columns)

    def own_rows(self, x_ND: Tensor) -> Tensor:
        """This tensor-parallel rank's rows [n, ...] of x [N, ...], which is the same on all ranks, as its gradient will
        be."""
        num_rows = len(x_ND)
        return moved(x_ND, self._own, functools.partial(self._all, num_rows=num_rows))

    def all_rows(self, x_nD: Tensor, num_rows: int) -> Tensor:
        """The rows x [n, ...] of each tensor-parallel rank, in the order of ranks: [N, ...], by a collective.

        Args:
            x_nD: this rank's of N rows, as `own_rows` has them.
            num_rows: N.
        """
        return moved(x_nD, functools.partial(self._all, num_rows=num_rows), self._own)

    def most(self, x: Tensor) -> Tensor:
        """The largest value over the tensor-parallel ranks, without a gradient."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def total(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, without a gradient."""
        return self._sum(x)

    def stacked(self, x: Tensor) -> Tensor:
        """x [...] of each tensor-parallel rank stacked by a collective: [R, ...], without a gradient."""
        out = x.new_empty(self.size, *x.shape)
        with self._counted("all_gather", out, out.nbytes):
            all_gather_rows(out.view(-1), x.contiguous().view(-1), group=self.group.handle)
        return out

    def scattered(self, x_R: Tensor) -> Tensor:
        """This tensor-parallel rank's part [...] of the sum of x [R, ...] by a collective, without a gradient."""
        out, x_R = x_R.new_empty(x_R.shape[1:]), x_R.contiguous()
        with self._counted("reduce_scatter", out, x_R.nbytes):
            reduce_scatter_rows(out.view(-1), x_R.view(-1), op=dist.ReduceOp.SUM, group=self.group.handle)
        return out

    def rows_of(self, num_rows: int) -> range:
        """The rows of so many that are this tensor-parallel rank's."""
        return rows_of(num_rows, self.size, self.rank)

    # ---- forward or backward, each the other's adjoint ----

    def _sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def _reduced(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        with self._counted("all_reduce", out, out.nbytes):
            dist.all_reduce(out, op, group=self.group.handle)
        return out

    def _columns(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._counted("all_gather", x, x.nbytes * self.size):
            dist.all_gather(parts, x.contiguous(), group=self.group.handle)
        return torch.cat(parts, -1)

    def _own(self, x_ND: Tensor) -> Tensor:
        rows = self.rows_of(len(x_ND))
        return x_ND[rows.start : rows.stop]

    def _all(self, x_nD: Tensor, num_rows: int) -> Tensor:
        each = -(-num_rows // self.size)
        missing = each - len(x_nD)
        padded = F.pad(x_nD, (0, 0) * (x_nD.ndim - 1) + (0, missing)) if missing else x_nD.contiguous()
        out = x_nD.new_empty(each * self.size, *x_nD.shape[1:])
        with self._counted("all_gather", out, out.nbytes):
            all_gather_rows(out.view(-1), padded.view(-1), group=self.group.handle)
        return out[:num_rows]

    @contextmanager
    def _counted(self, operation: Operation, x: Tensor, num_bytes: int) -> Iterator[None]:
        """A tensor-parallel collective, counted: an exchange of so many bytes of a whole tensor, of which each rank
        sends what others lack."""
        kind = ("tp", operation, wire_name(x.dtype))
        self.traffic.sent(*kind, whole_bytes(operation, num_bytes, self.size))
        began = time.perf_counter()
        yield
        if not x.is_cuda:
            took = time.perf_counter() - began
            self.traffic.took(*kind, took, took)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def moved(x: Tensor, there: Move, back: Move) -> Tensor:
    """Apply a linear collective to x, and its adjoint to the gradient."""
    return _Moved.apply(x, there, back)


class _Moved(torch.autograd.Function):
    """A linear map, and its adjoint backward."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Moved.apply(grad, ctx.back, ctx.there), None, None

"""What ranks that hold other parts of a matrix tell each other, forward and backward.

| | forward | backward |
|---|---|---|
| `spread` | nothing: each rank has the input | the sum over ranks, of each of which the gradient is a part |
| `joined` | the sum over ranks | nothing: each rank has the gradient of the sum |
| `gathered` | the columns of all ranks | this rank's columns |

A matrix cut by rows of its weight (outputs) stands between `spread` and the next one, cut by columns of its weight
(inputs), before `joined`. What is between them differs between ranks; all else is the same on each, and so are its
gradients. All ranks have the bits of one sum: a reduction is sent to all of them.

See: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.formats.tiled import WithCopies
from tilewright.parallel.world import Group


def spread(x: Tensor | WithCopies, group: Group) -> Tensor | WithCopies:
    """x [...], the same on all ranks, for layers of which each rank has a part. Its 8-bit copies stay as they are."""
    if isinstance(x, WithCopies):
        return x._replace(value=_Spread.apply(x.value, group))
    return _Spread.apply(x, group)


def joined(x: Tensor, group: Group) -> Tensor:
    """The sum of x [...] over the ranks, in its dtype."""
    return _Joined.apply(x, group)


def gathered(x: Tensor, group: Group) -> Tensor:
    """x [..., M] of each rank, in the order of ranks: [..., M * ranks]."""
    return _Gathered.apply(x, group)


def _sum(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group.handle)
    return out


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Joined.apply(grad, ctx.group), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _Spread.apply(grad, ctx.group), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.columns = group, x.shape[-1]
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size)]
        dist.all_gather(parts, x.contiguous(), group=group.handle)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.group.rank * ctx.columns, ctx.columns), None

"""Experts of a stack in a trace: one stands for all of its neighbours that have as many rows.

What it makes, and what its backward pass makes, counts for each of them (`byte_counter.begin_repeated`). What is around
the loop (split, unbind, cat and their gradients) counts as it does around the loop over all experts, and runs with a
part for each group: fake tensors for 128 experts take longer than all else in a layer.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewright.planner.trace.byte_counter import begin_repeated, count_walk, end_repeated, uncounted
from tilewright.precision.float8.weight import ExpertLoop

T = TypeVar("T")


class _Alike(NamedTuple):
    """Neighbouring experts, each with so many rows. `row`: the first row of the first of them."""

    first: int
    number: int
    rows: int
    row: int


class AlikeExperts(ExpertLoop):
    """A pass over the experts that runs the first of each group of neighbours with equal rows."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__(counts)
        self.groups: list[_Alike] = []
        first = row = 0
        for rows, alike in groupby(counts):
            self.groups.append(_Alike(first, len(list(alike)), rows, row))
            first, row = first + self.groups[-1].number, row + self.groups[-1].number * rows

    def split(self, x_PK: Tensor) -> Sequence[Tensor]:
        return self._for_all(_Split.apply(x_PK, self))

    def unbind(self, stack: Tensor) -> Sequence[Tensor]:
        return self._for_all(_Unbind.apply(stack, self))

    def each(self, of: Callable[[int], T]) -> list[T]:
        found = []
        for group in self.groups:
            begin_repeated(group.number)
            try:
                found.append(of(group.first))
            finally:
                end_repeated()
            if isinstance(found[-1], Tensor) and found[-1].requires_grad and group.rows:
                found[-1].register_hook(lambda _, number=group.number: begin_repeated(number))
        return self._for_all(found)

    def join(self, outs_PM: Sequence[Tensor]) -> Tensor:
        return _Join.apply(self, *(outs_PM[group.first] for group in self.groups if group.rows))

    def _for_all(self, firsts: Sequence[T]) -> list[T]:
        """Repeat the value of the first expert of each alike group for every expert of the group."""
        return [one for one, group in zip(firsts, self.groups, strict=True) for _ in range(group.number)]


class _Parts(torch.autograd.Function):
    """Parts of a tensor for the first expert of each group. Backward repeats what autograd does for all parts: parts
    that are not used are zeros, and the result is converted while the gradients of the parts are alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loop: AlikeExperts) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.loop, ctx.dtype = loop, x.grad_dtype if x.is_leaf else None
        sizes = [1 if ctx.stacked else group.rows for group in loop.groups]
        rests = [size * (group.number - 1) for size, group in zip(sizes, loop.groups, strict=True)]
        parts = x.split([size for pair in zip(sizes, rests, strict=True) for size in pair])[::2]
        with uncounted():
            return tuple(part.squeeze(0) for part in parts) if ctx.stacked else parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        end_repeated()
        whole = _put_together(ctx, grads)
        return whole.to(ctx.dtype or whole.dtype), None


def _put_together(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor:
    """The gradient of a tensor of alike experts from those of its parts."""
    one = next(grad for grad in grads if grad is not None)
    firsts = []
    for grad, group in zip(grads, ctx.loop.groups, strict=True):
        if grad is None:
            begin_repeated(group.number)
            shape = () if ctx.stacked else (group.rows, *one.shape[1:])
            grad = torch.zeros(shape, dtype=one.dtype, device=one.device)
            grad = grad.expand(one.shape) if ctx.stacked else grad
            end_repeated()
        firsts.append(grad)
    if ctx.stacked:
        return _whole(firsts, ctx.loop.groups, (len(ctx.loop.counts), *one.shape))
    return _whole(firsts, ctx.loop.groups, (sum(ctx.loop.counts), *one.shape[1:]))


def _whole(firsts: Sequence[Tensor], groups: Sequence[_Alike], shape: Sequence[int]) -> Tensor:
    """One tensor of what all experts have, from what the first of each group of alike ones has."""
    found = firsts[0].new_empty(shape)
    count_walk([(one, group.number) for one, group in zip(firsts, groups, strict=True)], found)
    return found


class _Split(_Parts):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loop: AlikeExperts) -> tuple[Tensor, ...]:
        ctx.stacked = False
        return _Parts.forward(ctx, x, loop)


class _Unbind(_Parts):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loop: AlikeExperts) -> tuple[Tensor, ...]:
        ctx.stacked = True
        return _Parts.forward(ctx, x, loop)


class _Join(torch.autograd.Function):
    """The rows of all experts from those of the first of each group."""

    @staticmethod
    def forward(ctx: Any, loop: AlikeExperts, *firsts: Tensor) -> Tensor:
        ctx.groups = [group for group in loop.groups if group.rows]
        rows = sum(len(one) * group.number for one, group in zip(firsts, ctx.groups, strict=True))
        return _whole(firsts, ctx.groups, (rows, *firsts[0].shape[1:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PM: Tensor) -> Any:
        found = []
        for group in ctx.groups:
            begin_repeated(group.number)
            found.append(grad_PM.narrow(0, group.row, group.rows))
            end_repeated()
        return None, *found

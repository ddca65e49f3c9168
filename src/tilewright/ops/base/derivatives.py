"""Gradients of which no further derivative can be taken: that is refused, where torch would silently give zero."""

from collections.abc import Callable

import torch
from torch import Tensor


def without_second(
    *grads: Tensor | None, of: tuple[Tensor | None, ...], error: Callable[[], Exception]
) -> tuple[Tensor | None, ...]:
    """Gradients as they are, without second derivatives: no further one can be taken.

    For the end of a `backward`. Differentiating the result (`create_graph=True`, then `backward`) raises `error()`.
    Compiled code needs none of it: torch.compile refuses second derivatives itself.

    Args:
        grads: results of the backward.
        of: what they were computed from: a derivative with respect to these is what is refused.
        error: makes what is raised.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    return _Barrier.apply(error, len(grads), *grads, *of)


class _Barrier(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(error, count, *tensors):
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.error = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise ctx.error()

"""A linear layer whose weight gradient may wait in a queue (`weight_gradient_queue`): one autograd function for all
implementations.

Legend: N tokens  M output features  K input features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tilewright.core.errors import ConfigError
from tilewright.ops.base.derivatives import without_second
from tilewright.ops.base.weight_gradient_queue import Waiting, WeightGradientQueue


@dataclass(frozen=True)
class LinearGemms:
    """The three matmuls of a linear layer by one implementation, with the weight in the input's dtype."""

    fprop: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """x [..., K], weight [M, K], bias [M] or None, all of one dtype -> [..., M]."""
    dgrad: Callable[[Tensor, Tensor], Tensor]
    """dy [..., M], weight [M, K] -> dx [..., K]."""
    wgrad: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    """dy [N, M], x [N, K], the weight's dtype -> its gradient [M, K]."""
    bgrad: Callable[[Tensor, torch.dtype], Tensor]
    """dy [N, M], the bias' dtype -> its gradient [M]."""


def deferred_linear(
    gemms: LinearGemms, x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, queue: WeightGradientQueue
) -> Tensor:
    """Compute x W^T + b of `gemms`, with a deferred weight gradient if the queue takes it; the bits are the same if
    not."""
    return _DeferredLinear.apply(gemms, queue, x, weight_MK, bias_M)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gemms, queue, x, weight_MK, bias_M):
        low_MK = weight_MK.to(x.dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, low_MK)
        # The parameter itself: recomputation hands out what it saves as tensors of their own.
        ctx.gemms, ctx.queue, ctx.weight = gemms, queue, weight_MK
        ctx.bias_dtype = None if bias_M is None else bias_M.dtype
        return gemms.fprop(x, low_MK, None if bias_M is None else bias_M.to(x.dtype))

    @staticmethod
    def backward(ctx, dy):
        x, low_MK = ctx.saved_tensors
        gemms, weight = ctx.gemms, ctx.weight
        _, _, wants_dx, wants_dw, wants_db = ctx.needs_input_grad
        dx = dw = db = None
        with torch.no_grad():
            dy_NM = dy.reshape(-1, dy.shape[-1])
            if wants_dx:
                dx = gemms.dgrad(dy, low_MK)
            if wants_dw:
                x_NK = x.reshape(-1, x.shape[-1])
                waiting = Waiting(partial(gemms.wgrad, dy_NM, x_NK, weight.dtype), (dy_NM, x_NK))
                if ctx.queue.takes(weight):
                    ctx.queue.add(weight, waiting)
                else:
                    dw = waiting.compute()
            if wants_db:
                db = gemms.bgrad(dy_NM, ctx.bias_dtype)
        return None, None, *without_second(dx, dw, db, of=(dy, x, low_MK), error=_no_second)


def _no_second() -> ConfigError:
    return ConfigError(
        "Layers whose weight gradients may wait have no second derivative",
        got="a gradient of a gradient (create_graph=True, a gradient penalty)",
        need="layers without a queue of weight gradients",
        try_="tilewright.precision.mixed.gradient_queues.detach(model)",
    )

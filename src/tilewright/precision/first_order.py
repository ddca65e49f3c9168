"""What derivatives of FP8 GEMMs there are: first ones, in backward mode. Any other is refused in words.

The gradient of a rounding is taken to be that of no rounding (straight-through). The second derivative of that would
be a number without a meaning: zero where an operator has no derivative of its own.
"""

import torch
from torch import Tensor

from tilewright.core.errors import ConfigError


def first_order_only(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients as they are, of which no further derivative can be taken.

    For the end of a `backward`. Differentiating the result (`create_graph=True`, then `backward`) raises ConfigError.
    Compiled code needs none of it: torch.compile refuses second derivatives itself.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return grads
    leaves = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    return _Barrier.apply(*leaves)


class _Barrier(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*grads):
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise ConfigError(
            "FP8 layers have no second derivative",
            got="a gradient of a gradient (create_graph=True, a gradient penalty, torch.func.hessian)",
            need="layers in 16 or 32 bits where it is taken",
            try_='tilewright.set_mode(model, "bf16_mixed"), or a rule for these layers with compute = "bf16"',
            where="precision",
        )

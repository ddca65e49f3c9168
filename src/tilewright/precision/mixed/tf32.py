"""TF32 matmuls where no TF32 unit is at hand: operands rounded to 10 mantissa bits, matmuls and sums in FP32.

A matmul of two such values is exact in FP32, so this has the operands of a TF32 unit in all three matmuls of a
layer: forward, input gradient and weight gradient. A unit may round its operands otherwise than to nearest even,
and adds in its own order.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.formats.spec import TF32, round_to


class _RoundValue(torch.autograd.Function):
    """Rounds in forward; the gradient passes as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return round_to(x, TF32)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class _RoundGradient(torch.autograd.Function):
    """Passes in forward; rounds the gradient, the operand that both backward matmuls share."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return round_to(grad.contiguous(), TF32)


def tf32_matmul(
    matmul: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`matmul(x, weight) + bias`, the matmul linear in both, with TF32 operands forward and backward.

    Args:
        matmul: a linear layer or convolution without bias.
        x: FP32 input.
        weight: FP32 weight.
        bias: added in FP32, as broadcasting has it.

    Example:
        >>> x, w = torch.tensor([[1.0 + 2**-12]]), torch.tensor([[3.0]])
        >>> tf32_matmul(torch.nn.functional.linear, x, w)
        tensor([[3.]])
    """
    out = _RoundGradient.apply(matmul(_RoundValue.apply(x), _RoundValue.apply(weight)))
    if bias is not None:
        return out + bias
    # A view made inside of a Function: autograd lets nobody write into it, as an activation in place does.
    return out.clone() if out.requires_grad else out

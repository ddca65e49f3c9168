"""AWQ: input channels with large activations get finer weights, and the norm before undoes it. Exact before rounding.

A norm's weight is divided by s and the columns of the linear layers that read it are multiplied by s = mean|x|^alpha;
alpha is the one of eleven with the smallest output error of the rounded layers. alpha = 0 is plain rounding, so the
layers that share a norm do not get worse on their calibration inputs. Which layers read a norm is seen in a pass;
whether nothing else does is checked by the loss, and a scaling that changes it is undone.

See: Lin et al., "AWQ", 2024. Only norms are scaled here, not values before output projections.

Legend: N out features  K in features.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tilewright.compress.quantize.gptq import output_error
from tilewright.formats.integer import IntegerTensor

ALPHAS = tuple(step / 10 for step in range(11))


def best_scale(
    weights: list[Tensor], mean_K: Tensor, hessian_KK: Tensor, round_weight: Callable[[Tensor], IntegerTensor]
) -> Tensor:
    """Find AWQ's scale [K] in FP32 of the input channels that these weights share; ones if none is better.

    Args:
        weights: [N, K] each, that read the same input.
        mean_K: mean magnitude of each input channel.
        hessian_KK: X^T X of the input.
        round_weight: how the scaled weights will be rounded.
    """
    found, least = torch.ones_like(mean_K, dtype=torch.float32), torch.inf
    for alpha in ALPHAS:
        scale = mean_K.float().clamp(min=1e-6 * float(mean_K.max().clamp(min=1e-30))) ** alpha
        scale = scale / (scale.max() * scale.min()).sqrt()
        error = 0.0
        for weight in weights:
            rounded = round_weight(weight.detach() * scale).dequantize() / scale
            error += output_error(weight.detach(), rounded, hessian_KK)
        if error < least:
            found, least = scale, error
    return found


@torch.no_grad()
def fold(norm: nn.Module, layers: Sequence[nn.Linear], scale_K: Tensor) -> None:
    """Fold AWQ's scale into the model: divide a norm's weight (and bias) by it, and multiply the columns of the layers
    that read the norm."""
    for parameter in norm.parameters(recurse=False):
        parameter.div_(scale_K.to(parameter.dtype))
    for layer in layers:
        layer.weight.mul_(scale_K.to(layer.weight.dtype))

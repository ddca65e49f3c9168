"""Give a model's linear layers a queue for their weight gradients (`ops.base.weight_gradient_queue`), or take it away.

Layers that multiply with a parameter of their own take one: `CastLinear`, `Float8Linear` (also as grouped experts),
plain `nn.Linear`, and the head in its loss. The rest is computed as ever: weights that are made from others (integers,
TF32 without a unit, parametrizations), adapters, routers, embeddings, norms, biases, stacked experts of other classes.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.ops.base.deferred_linear import deferred_linear
from tilewright.ops.base.weight_gradient_queue import WeightGradientQueue, breaks_graph, queue_now
from tilewright.ops.linear import gemms_of
from tilewright.precision.mixed.cast_layers import become, plain_layer


class QueuedLinear(nn.Linear):
    """torch's layer, whose weight gradient may wait."""

    weight_queue: WeightGradientQueue | None = None

    def forward(self, input: Tensor) -> Tensor:
        if compiled := breaks_graph(self):
            return compiled.eagerly(self.forward, input)  # type: ignore[misc]
        queue, kind = queue_now(self), input.device.type
        if queue is None:
            return super().forward(input)
        if not torch.is_autocast_enabled(kind):
            return deferred_linear(gemms_of("native"), input, self.weight, self.bias, queue)
        with torch.autocast(kind, enabled=False):
            low = input.to(torch.get_autocast_dtype(kind))
            return deferred_linear(gemms_of("native"), low, self.weight, self.bias, queue)


def attach(model: nn.Module, queue: WeightGradientQueue) -> list[str]:
    """Let the weight gradients of a model's linear layers wait in a queue, while a region of it is open.

    The model is converted before. Compiled code ends around these layers: it does not see the queue. What is recomputed
    is compiled inside of what recomputes it, as `Decoder.compile_blocks(waits=True)` does. Classes of plain `nn.Linear`
    layers change in place; parameters and names stay.

    Args:
        model: or one stage of it.
        queue: which other models do not have.

    Returns:
        Names of the layers.

    Example:
        >>> model, queue = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), WeightGradientQueue()
        >>> names = attach(model, queue)
        >>> with queue.region():
        ...     model(torch.ones(4, 2)).sum().backward()
        ...     queue.cut(0)
        ...     waits = len(queue), model[0].weight.grad is None
        ...     queue.run(0)
        >>> names, waits, model[0].weight.grad.shape
        (['0', '2'], (2, True), torch.Size([3, 2]))
    """
    queue.eagerly = cast(Any, torch.compiler.disable)(_call)  # whose annotation has other arguments
    names = []
    for name, module in model.named_modules():
        if plain_layer(module) is nn.Linear:
            become(module, QueuedLinear)
        if hasattr(type(module), "weight_queue"):
            cast(Any, module).weight_queue = queue
            names.append(name)
    return names


def detach(model: nn.Module) -> None:
    """Take the queue of weight gradients from each layer of a model. Nothing may wait in it."""
    for module in model.modules():
        if vars(module).pop("weight_queue", None) and plain_layer(module) is QueuedLinear:
            become(module, nn.Linear)


def _call(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)

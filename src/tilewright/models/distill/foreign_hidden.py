"""Hidden values that layers of a foreign model learn: its own forward runs, with the layers' losses behind its layers.

A layer is called as it always is, and its loss is outside of what of it is compiled or computed again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.base.stand_ins import stand_ins
from tilewright.models.distill.hidden import VALUES, HiddenLoss, of_batch


def loss_beside_hidden(
    forward: Callable[[dict[str, Tensor]], LossOutput],
    hidden_loss: HiddenLoss,
    place: tuple[nn.Module, str],
    batch: Mapping[str, Tensor],
) -> LossOutput:
    """The loss of a batch with that of all pairs of layers.

    Args:
        forward: the loss of a batch without hidden values; it calls each layer once.
        hidden_loss: of the pairs.
        place: of the list of layers: a module, and the list's name in it.
        batch: with `VALUES`.

    Raises:
        ConfigError: a layer gives something else than one vector per position.
    """
    context, layers = of_batch(batch), getattr(*place)

    def visit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = layers[index](*args, **kwargs)
        if isinstance(out, tuple):
            return (learned(hidden_loss, index, out[0], context), *out[1:])
        return learned(hidden_loss, index, out, context)

    with stand_ins(*place, visit):
        out = forward(without_values(batch))
    return hidden_loss.added(out, context)


def learned(hidden_loss: HiddenLoss | None, index: int, x_BSD: Tensor, context: LayerContext) -> Tensor:
    """The output of a layer; backward adds the gradient of its loss, if it has one. Outside of autocast.

    Args:
        hidden_loss: of the pairs; None: no layer learns.
        index: of the layer.
        x_BSD: its output.
        context: with the entries of `of_batch`.
    """
    if hidden_loss is None:
        return x_BSD
    with torch.autocast(x_BSD.device.type, enabled=False):
        return hidden_loss(index, x_BSD, context)


def without_values(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch without what its layers learn."""
    return {name: tensor for name, tensor in batch.items() if name != VALUES}

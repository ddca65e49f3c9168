"""Hidden values that layers of a foreign model learn: its own forward runs, with the layers' losses behind its layers.

A layer is called as it always is, and its loss is outside of what of it is compiled or computed again. What its
attention gives out is seen by a hook, which is there in the first pass alone: torch computes the same again for
backward.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.models.base.protocols import LayerContext, LossOutput
from tilewright.models.base.stand_ins import stand_ins
from tilewright.models.distill.hidden import VALUES, HiddenLoss, captured, of_batch

AttentionOf = Callable[[nn.Module], nn.Module | None]
"""See `protocols.Model.attention_of`."""


def loss_beside_hidden(
    forward: Callable[[dict[str, Tensor]], LossOutput],
    hidden_loss: HiddenLoss,
    attention_of: AttentionOf,
    place: tuple[nn.Module, str],
    batch: Mapping[str, Tensor],
) -> LossOutput:
    """The loss of a foreign model's batch with that of all pairs of hidden values.

    Args:
        forward: the loss of a batch without hidden values; it calls each layer once.
        hidden_loss: of the pairs.
        attention_of: of a layer.
        place: of the list of layers: a module, and the list's name in it.
        batch: with `VALUES`.

    Raises:
        ConfigError: a layer gives something else than one vector per position.
    """
    context, layers = of_batch(batch), getattr(*place)

    def visit(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, given = call_layer(hidden_loss, index, layers[index], attention_of, args, kwargs)
        if isinstance(out, tuple):
            return (learned(hidden_loss, index, out[0], given, context), *out[1:])
        return learned(hidden_loss, index, out, given, context)

    with stand_ins(*place, visit):
        out = forward(without_values(batch))
    return hidden_loss.added(out, context)


def call_layer(
    hidden_loss: HiddenLoss | None,
    index: int,
    layer: nn.Module,
    attention_of: AttentionOf,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Tensor | None]:
    """Call a layer of a third-party model: its results, and the output of its attention if that is learned.

    Args:
        hidden_loss: of the pairs; None: no layer learns.
        index: of the layer.
        layer: that is called.
        attention_of: of a layer.
        args, kwargs: of the layer.
    """
    attention = attention_of(layer) if hidden_loss is not None and hidden_loss.reads_attention(index) else None
    if attention is None:
        return layer(*args, **kwargs), None
    with captured({index: attention}) as found:
        return layer(*args, **kwargs), found.get(index)


def learned(
    hidden_loss: HiddenLoss | None, index: int, x_BSD: Tensor, given_BSD: Tensor | None, context: LayerContext
) -> Tensor:
    """Return the output of a third-party layer; backward adds the gradient of its loss on hidden values, if it has one.
    Outside of autocast.

    Args:
        hidden_loss: of the pairs; None: no layer learns.
        index: of the layer.
        x_BSD: its output.
        given_BSD: output of its attention; None: it is not learned.
        context: with the entries of `of_batch`.
    """
    if hidden_loss is None:
        return x_BSD
    with torch.autocast(x_BSD.device.type, enabled=False):
        return hidden_loss(index, x_BSD, given_BSD, context)


def without_values(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch for a foreign model without the hidden values that its layers learn."""
    return {name: tensor for name, tensor in batch.items() if name != VALUES}

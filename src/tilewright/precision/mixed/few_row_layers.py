"""Give a model that draws tokens layers that are fast for a few rows (`row_linear` and `cached_layer` of `ops.linear`).

Linear layers that are torch's plain `nn.Linear` change: our decoder's and those of Hugging Face models, their heads
too. So do whole layers of our decoder, dense and with grouped-query attention. Others compute as ever: layers with
adapters, in 8 bits, or converted to another format.
"""

from typing import cast

from torch import nn

from tilewright.core.hardware import Machine
from tilewright.models.decoder.block import Block
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.linear import CACHED_LAYER, ROW_LINEAR
from tilewright.precision.mixed.cast_layers import become, plain_layer
from tilewright.precision.mixed.row_block import RowBlock
from tilewright.precision.mixed.row_linear import RowLinear


def attach(model: nn.Module, machine: Machine) -> list[str]:
    """Make the plain linear layers of a model fast for a few rows, if this machine has code for their dtype.

    Classes of layers change in place; parameters, names and what larger inputs give stay. Adapters go on
    before: they look for plain layers.

    Args:
        model: loaded, and not to be trained or converted.
        machine: where it runs.

    Returns:
        Names of the linear layers.

    Example:
        >>> import torch
        >>> from tilewright.core.hardware import detect_machine
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> before = model(torch.ones(1, 2))
        >>> names = attach(model, detect_machine("cpu"))
        >>> with torch.no_grad():
        ...     torch.allclose(model(torch.ones(1, 2)), before)
        True
    """
    names = []
    for name, module in model.named_modules():
        if plain_layer(module) is not nn.Linear:
            continue
        weight = cast(nn.Linear, module).weight
        found = choose(ROW_LINEAR, machine, Case(weight.device.type, weight.dtype)).candidate
        if found.name != "native":
            become(module, RowLinear)
            module.row_linear, module.row_dtype = found.run, weight.dtype  # type: ignore[assignment]
            names.append(name)
    for module in model.modules():
        if plain_layer(module) is not Block:
            continue
        weight = next(module.parameters())
        found = choose(CACHED_LAYER, machine, Case(weight.device.type, weight.dtype)).candidate
        if found.name != "ref":
            become(module, RowBlock)
            module.cached_layer, module.row_dtype = found.run, weight.dtype  # type: ignore[assignment]
    return names

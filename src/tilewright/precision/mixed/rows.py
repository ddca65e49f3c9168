"""Give a model that draws tokens linear layers that are fast for a few rows (`row_linear` of `ops.linear`).

Layers that are torch's plain `nn.Linear` change: our decoder's and those of Hugging Face models, their heads too.
Others compute as ever: layers with adapters, in 8 bits, or converted to another format.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright.core.hardware import Machine
from tilewright.ops.base.dispatch import Case, choose
from tilewright.ops.base.transforms import is_followed
from tilewright.ops.linear import MOST_ROWS, ROW_LINEAR
from tilewright.precision.mixed.cast import become, plain_layer


class RowLinear(nn.Linear):
    """torch's layer. An input of a few rows goes to `row_linear`, where its values are read and nothing else: without
    autograd, autocast, compilation and whatever else follows torch's operations. The weight is read at each call, so
    what was written to it counts; it may have another dtype or device by then, which torch's own computes."""

    row_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Set by `attach`."""
    row_dtype: torch.dtype
    """That it was chosen for."""

    def forward(self, input: Tensor) -> Tensor:
        weight_MK, bias_M = self.weight, self.bias
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or not _are_rows(input, weight_MK, bias_M, self.row_dtype)
        ):
            return F.linear(input, weight_MK, bias_M)
        return self.row_linear(input, weight_MK, bias_M)


def _are_rows(x: Tensor, weight_MK: Tensor, bias_M: Tensor | None, dtype: torch.dtype) -> bool:
    """True for a few rows of tensors whose memory, on the host, has their values."""
    return (
        type(x) is Tensor
        and type(weight_MK) is nn.Parameter
        and not is_followed()
        and 0 < x.numel() <= MOST_ROWS * weight_MK.shape[1]
        and x.shape[-1:] == weight_MK.shape[1:]
        and x.dtype == weight_MK.dtype == dtype
        and (bias_M is None or bias_M.dtype == dtype)
        and x.is_cpu
        and weight_MK.is_cpu
        and not x.is_neg()
        and weight_MK.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def attach(model: nn.Module, machine: Machine) -> list[str]:
    """Make the plain linear layers of a model fast for a few rows, where this machine has code for their dtype.

    Classes of layers change in place; parameters, names and what larger inputs give stay. Adapters go on
    before: they look for plain layers.

    Args:
        model: loaded, and not to be trained or converted.
        machine: where it runs.

    Returns:
        Names of the layers.

    Example:
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
    return names

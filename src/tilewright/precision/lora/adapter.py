"""The adapter of a layer: two parameters beside the weight, and a hook that adds what they make.

Legend: K input features  M output features  R rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from tilewright.formats.tiled import WithCopies
from tilewright.ops.backends.ref.adam import hash_of
from tilewright.ops.linear import machines_linear
from tilewright.precision.float8.frozen_linear import FrozenFloat8Linear
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.float8.third_party import owned
from tilewright.precision.mixed.cast_layers import CastLinear


class Adapted(nn.Module):
    """A layer with an adapter: `attach` gives a layer these attributes; its class stays."""

    weight: Tensor
    """A parameter, or the codes of a frozen layer."""
    lora_A: nn.Parameter
    """[R, K] FP32."""
    lora_B: nn.Parameter
    """[M, R] FP32."""
    lora_scaling: float
    lora_rslora: bool
    lora_dropout: float
    lora_hook: RemovableHandle


def is_transposed(module: nn.Module) -> bool:
    """True if a layer that gets an adapter stores its weight as [K, M], as Conv1D of GPT-2 does."""
    return any(weight.transposed and not weight.stacked for weight in owned(module))


def attach(module: Any, rank: int, scaling: float, rslora: bool, dropout: float) -> None:
    """Attach an adapter to a layer, without values.

    Args:
        module: a linear layer.
        rank, scaling, rslora, dropout: see `lora.add_lora`; `scaling` is what the adapter's product counts.
    """
    options = {"device": module.weight.device, "dtype": torch.float32}
    rows, columns = module.weight.shape
    out_features, in_features = (columns, rows) if is_transposed(module) else (rows, columns)
    module.lora_A = nn.Parameter(torch.empty(rank, in_features, **options))
    module.lora_B = nn.Parameter(torch.empty(out_features, rank, **options))
    module.lora_scaling, module.lora_rslora, module.lora_dropout = scaling, rslora, dropout
    module.lora_hook = module.register_forward_hook(_add_adapter)


def _add_adapter(module: Any, inputs: tuple[Tensor | WithCopies, ...], out: Tensor) -> Tensor:
    """The layer's output plus the adapter's, computed in BF16, or in what the layer itself computes in."""
    x = inputs[0].value if isinstance(inputs[0], WithCopies) else inputs[0]
    down_RK, up_MR, scaling = module.lora_A, module.lora_B, module.lora_scaling
    if isinstance(module, CastLinear):
        dtype = module.compute_dtype
    elif isinstance(module, Float8Linear | FrozenFloat8Linear):
        fprop = module.gemms.fprop if isinstance(module, Float8Linear) else module.fprop
        dtype = torch.float32 if fprop.name == "fp32" else torch.bfloat16
    else:
        dtype = x.dtype
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(dtype)
        x = _zero_some(module, x) if module.lora_dropout and module.training else x
        low = machines_linear(x, down_RK.to(dtype))
        return out + (machines_linear(low, up_MR.to(dtype)) * scaling).to(out.dtype)


def kept_by(key_N: Tensor, width: int, dropout: float) -> Tensor:
    """Choose by keys which elements [N, K] of an adapter's input dropout keeps: a pure function of their keys and
    columns.

    Args:
        key_N: int32.
        width: K.
        dropout: share that is dropped, to 2^-24.

    Example:
        >>> kept = kept_by(torch.arange(1000, dtype=torch.int32), 64, 0.25)
        >>> kept.shape, round(kept.float().mean().item(), 2)
        (torch.Size([1000, 64]), 0.75)
    """
    columns_K = torch.arange(width, dtype=torch.int32, device=key_N.device)
    return (hash_of(columns_K, key_N[:, None]) & 0xFFFFFF) >= dropout * 2**24


def _zero_some(module: Any, x: Tensor) -> Tensor:
    """Apply an adapter's dropout: x [..., K] without some of its elements. A rank with some of the columns draws for
    all of them, as the ranks with the others do from the same state: each drops what one process would. Rows that have
    keys, as those of routed experts, lose what their keys say, on whatever rank."""
    if (key_N := vars(module).get("row_keys")) is not None:
        kept_NK = kept_by(key_N, x.shape[-1], module.lora_dropout)
        return torch.where(kept_NK, x / (1 - module.lora_dropout), 0.0)
    down_RK, held = module._parameters["lora_A"], x.shape[-1]
    if not isinstance(down_RK, DTensor) or down_RK.shape[1] == held:
        return F.dropout(x, module.lora_dropout)
    first = down_RK.device_mesh.get_local_rank() * held  # of one axis, over which columns come out even
    kept = F.dropout(x.new_ones(*x.shape[:-1], down_RK.shape[1]), module.lora_dropout)
    return x * kept[..., first : first + held].contiguous()

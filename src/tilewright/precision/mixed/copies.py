"""Parameters in 16 bits have gradients in FP32, which torch's DistributedDataParallel does not take. Said in words
before its backward pass fails ("Expected Half, got Float")."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tilewright.core.errors import ConfigError

WIDE_GRADIENTS = (
    "gradients are FP32: an optimizer must take them (DeepSeekAdam does; call its init_states() before torch's\n"
    "get_state_dict or set_state_dict), and copies on several processes sum them by GradientReduction, not torch's DDP"
)


def has_wide_gradients(model: nn.Module) -> bool:
    """Whether a trained parameter has a gradient of another dtype than its own."""
    plain = (param for param in model.parameters() if not isinstance(param, DTensor))
    return any(param.requires_grad and param.is_leaf and param.grad_dtype not in (None, param.dtype) for param in plain)


def refuse_ddp(model: nn.Module) -> None:
    """Let a model with such gradients raise in a forward pass of torch's DistributedDataParallel."""
    if _check not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check)


def _check(model: nn.Module, inputs: Any) -> None:
    if model.training and DistributedDataParallel._get_active_ddp_module() is not None and has_wide_gradients(model):
        raise storage_refused("torch's DistributedDataParallel")


def storage_refused(wrapper: str) -> ConfigError:
    """The error of a wrapper that cannot train such a model.

    Args:
        wrapper: for a user.
    """
    return ConfigError(
        f"{wrapper} cannot train parameters that are stored in 16 bits",
        got="parameters in 16 bits with gradients in FP32, which it reduces in the parameters' own format",
        need="parameters in FP32; or sums of FP32 gradients",
        try_='convert(model, "hybrid"): FP16 matmuls, FP32 parameters; or without the wrapper\n'
        "tilewright.parallel.gradients.GradientReduction (copies) or parallel.shard.shard (shards)",
    )

"""Errors for 16-bit parameters under torch's DDP and FSDP2, which do not take their FP32 gradients: raised before DDP's
backward pass fails ("Expected Half, got Float"), or FSDP2's makes gradients of 16 bits.

A call of `fully_shard` on parameters of several dtypes (16-bit matrices with FP32 norms) fails in torch's own assertion
("FSDP expects uniform original parameter dtype"), in a hook that comes before any code of the model. The explanation is
then a note of that error.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tilewright.core.errors import ConfigError

_LOW = (torch.float16, torch.bfloat16)
WIDE_GRADIENTS = (
    "gradients are FP32: an optimizer must take them (DeepSeekAdam does; call its init_states() before torch's\n"
    "get_state_dict or set_state_dict), copies on several processes sum them by GradientReduction, not torch's DDP,\n"
    "and shards are made by parallel.shard.shard: torch's fully_shard wants one dtype for all parameters of a call"
)


def has_wide_gradients(model: nn.Module) -> bool:
    """True where 16-bit parameters have wide gradients (copies in FP32): a trained parameter has a gradient of another
    dtype than its own."""
    plain = (param for param in model.parameters() if not isinstance(param, DTensor))
    return any(param.requires_grad and param.is_leaf and param.grad_dtype not in (None, param.dtype) for param in plain)


def refuse_wrappers(model: nn.Module) -> None:
    """Let a model with FP32 gradients raise in a forward pass of torch's DistributedDataParallel, and of `fully_shard`
    where it was not called by `parallel.shard`: its parts would silently have gradients in 16 bits. Where torch itself
    refuses the shards, its error gets the words."""
    if _check not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check)
        model.register_forward_hook(_explain, always_call=True)


def _check(model: nn.Module, inputs: Any) -> None:
    if model.training and DistributedDataParallel._get_active_ddp_module() is not None and has_wide_gradients(model):
        raise storage_refused("torch's DistributedDataParallel")
    if model.training and _has_narrow_parts(model):
        raise storage_refused("torch's fully_shard")


def _explain(model: nn.Module, inputs: Any, output: Any) -> None:
    """Explain wide gradients after a forward pass that failed in `fully_shard`'s preparation: add to torch's error what
    it means here."""
    if torch.compiler.is_compiling():
        return
    error = sys.exception()
    if isinstance(error, AssertionError) and "uniform original parameter dtype" in str(error):
        words = str(storage_refused("torch's fully_shard"))
        if words not in getattr(error, "__notes__", ()):
            error.add_note(words)


def _has_narrow_parts(model: nn.Module) -> bool:
    low = (param for param in model.parameters() if param.requires_grad and param.dtype in _LOW)
    part = next((param for param in low if isinstance(param, DTensor)), None)
    return part is not None and part.grad_dtype in (None, part.dtype)


def storage_refused(wrapper: str) -> ConfigError:
    """The error of a wrapper that cannot train a model with wide gradients.

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

"""Checks of DeepSeekAdam's parameters, before any of them changes: what it cannot update is refused in words.

Its kernels read and write memory as it lies, so a tensor of another shape, dtype or device than they take for granted
would end in a crash or in wrong numbers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tilewright.core.errors import ConfigError
from tilewright.formats.quadratic_map import BLOCK
from tilewright.ops.base.tensor_parts import columns_cut
from tilewright.optim.states import StateFormat, described, fits, of_layout

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_param(param: Tensor, format: StateFormat) -> None:
    """Validate a parameter: raise if it cannot be updated with states of this format.

    Raises:
        ConfigError: its dtype, or its sharding.
    """
    if isinstance(param, DTensor):
        _check_sharding(param, format)
    if param.dtype not in _DTYPES:
        numbers = " (for complex numbers: their torch.view_as_real)" if param.is_complex() else ""
        raise _refused(param, f"a parameter of {param.dtype}", f"FP32, FP64, BF16 or FP16{numbers}")
    if format.master != "fp32" and param.dtype == torch.float16:
        need = "BF16 or FP32 parameters: stochastic rounding is defined for BF16"
        raise _refused(param, f'an FP16 parameter with master="{format.master}"', need, 'master="fp32"')
    if format.moments == "8bit" and param.dtype == torch.float64:
        need = "FP32 or 16-bit parameters: 8-bit moments are updated in FP32"
        raise _refused(param, "an FP64 parameter with 8-bit moments", need, 'moments="fp32"')


def check_update(param: Tensor, grad: Tensor, state: Mapping[str, Any], format: StateFormat) -> None:
    """Validate an update: raise if this gradient cannot be applied to this parameter.

    Args:
        param: a parameter of the optimizer.
        grad: its gradient.
        state: its states; empty where there are none yet.
        format: of the states.

    Raises:
        ConfigError: see `check_param`; or the gradient is sparse or of another tensor, or the states are.
    """
    # Each check relies on the ones before it: states are compared with a parameter that is fit to be updated.
    check_param(param, format)
    if grad.layout != torch.strided:
        need = "a dense gradient: AdamW moves all elements in each step"
        raise _refused(param, f"a sparse gradient ({grad.layout})", need, "nn.Embedding(..., sparse=False)")
    if (
        grad.shape != param.shape
        or grad.device != param.device
        or isinstance(grad, DTensor) != isinstance(param, DTensor)
    ):
        need = f"a gradient of {_described(param)}"
        raise _refused(param, f"a gradient of {_described(grad)}", need, "zero_grad() after the parameter was changed")
    # An expanded tensor would be updated several times in one place.
    if not param.is_contiguous() and _overlaps(param):
        got = f"a parameter with strides {param.stride()}, whose elements share memory"
        raise _refused(
            param, got, "memory of its own for each element", "param.data = param.data.clone(), not expanded"
        )
    # States of another shape or device: the parameter was changed after the first step.
    layout = format.layout(param.shape, param.dtype)
    if state and not (fits(state, layout) and _are_beside(state, layout, param)):
        raise _refused(
            param,
            f"states from before the parameter was changed: {described(state)} on {_home(state['exp_avg'])}"
            if "exp_avg" in state
            else f"states with {described(state)}",
            f"{of_layout(layout)} ({format}) on {_home(param)}",
            "optimizer.state.pop(param), which begins its moments at zero; or change dtype, shape and device of the\n"
            "model before the optimizer's first step",
        )


def check_not_replaced(params: Iterable[Tensor]) -> None:
    """Validate that `fully_shard` has not replaced one of these parameters in the model; raise if it has.

    Raises:
        ConfigError: these parameters will never have a gradient again.
    """
    # FSDP2 of torch 2.13 marks what it replaces, that of 2.11 does not; there is no public way to know.
    replaced = [param for param in params if param.grad is None and hasattr(param, "_fsdp_orig_uid")]
    if replaced:
        raise ConfigError(
            "Parameters of the optimizer that are no longer in the model",
            got=f"{len(replaced)} parameters that fully_shard replaced, the first of shape {tuple(replaced[0].shape)}",
            need="the parameters that the model has now",
            try_="make the optimizer after fully_shard",
        )


def _check_sharding(param: DTensor, format: StateFormat) -> None:
    """Validate the sharding of states. Nothing is rounded of FP32 ones: any part of a tensor will do. Random bits go by
    rows and columns, and no part may cut a block of codes."""
    if any(placement.is_partial() for placement in param.placements):
        got = f"a sharded parameter (DTensor) with placements {param.placements}"
        raise _refused(
            param, got, "placements Shard or Replicate", "param.redistribute(...) before the optimizer is made"
        )
    rounded = format.moments != "fp32" or (format.master != "fp32" and param.dtype == torch.bfloat16)
    if not rounded:
        return
    parts = columns_cut(param)
    got = f"a sharded parameter (DTensor) with placements {param.placements} and {format}"
    if parts is None:
        need = "whole rows on each rank, or a block of a matrix, since states or weights are rounded stochastically:\n"
        need += (
            "placements Shard(0), of a matrix Shard(1) too, or Replicate, in equal parts where several axes cut a dim"
        )
        raise _refused(param, got, need, 'fully_shard without a shard_placement_fn, or moments="fp32", master="fp32"')
    if format.moments == "8bit" and parts > 1 and param.shape[1] % (parts * BLOCK):
        need = f"a multiple of {parts * BLOCK} columns: {parts} equal parts of blocks of {BLOCK}, which share a scale"
        raise _refused(param, got, need, 'moments="bf16" or "fp32", or Shard(0)')


def _refused(
    param: Tensor, got: str, need: str, try_: str = "leave this parameter to another optimizer"
) -> ConfigError:
    what = "Parameter that DeepSeekAdam cannot update"
    return ConfigError(what, got=f"{got}; shape {tuple(param.shape)}", need=need, try_=try_)


def _described(tensor: Tensor) -> str:
    kind = f"DTensor, {tensor.placements}, " if isinstance(tensor, DTensor) else ""
    return f"{kind}shape {tuple(tensor.shape)} on {tensor.device}"


def _home(tensor: Tensor) -> str:
    return f"{tensor.device}, {tensor.placements}" if isinstance(tensor, DTensor) else str(tensor.device)


def _are_beside(state: Mapping[str, Any], names: Iterable[str], param: Tensor) -> bool:
    """True if the named optimizer states are on their parameter's device (for a DTensor: with its mesh and shards)."""
    if not isinstance(param, DTensor):
        device = param.device
        return not any(state[name].device != device or isinstance(state[name], DTensor) for name in names)
    where = param.device_mesh, param.placements
    held = [state[name] for name in names]
    return all(isinstance(value, DTensor) and (value.device_mesh, value.placements) == where for value in held)


def _overlaps(tensor: Tensor) -> bool:
    """True if two elements of a parameter may share memory: the stride of one dimension is within the reach of finer
    ones."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False

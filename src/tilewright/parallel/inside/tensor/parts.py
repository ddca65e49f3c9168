"""Parts of parameters in the place of the whole ones: DTensors for what stores and updates them, plain tensors for the
module while it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tilewright.memory.offload.lazy_params import is_placeholder
from tilewright.ops.base.parts import computed_part


@torch.no_grad()
def part_along(mesh: DeviceMesh, whole: nn.Parameter, dim: int) -> nn.Parameter:
    """This rank's part of a parameter.

    Args:
        mesh: of one axis.
        whole: on meta, or with memory; of a placeholder the part is on meta.
        dim: along which it is cut; comes out even.
    """
    seen = whole.to("meta") if is_placeholder(whole) else whole
    local = seen.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = whole.shape, torch.empty(whole.shape, device="meta").stride()
    part = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
    param = nn.Parameter(part, whole.requires_grad)
    param.__dict__.update(whole.__dict__)
    return param


def shape_along(parts: int, whole: nn.Parameter, dim: int) -> nn.Parameter:
    """A parameter of the shape of a part, without memory.

    Args:
        parts: how many there are.
        whole: the parameter.
        dim: along which it is cut; comes out even.

    Example:
        >>> shape_along(2, nn.Parameter(torch.ones(4, 6)), 1).shape
        torch.Size([4, 3])
    """
    shape = [size // parts if place == dim else size for place, size in enumerate(whole.shape)]
    param = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad)
    param.__dict__.update(whole.__dict__)
    return param


def run_on_parts(module: nn.Module, hidden: tuple[str, ...] = ()) -> None:
    """Let a module compute on the parts of its parameters that are here.

    Args:
        module: with parameters from `part_along`, maybe sharded further.
        hidden: parameters that it computes without.
    """

    def enter(module: nn.Module, _: Any) -> None:
        _enter(module)
        module.__dict__.update(dict.fromkeys(hidden))

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(_leave, always_call=True)


@contextmanager
def on_part(module: nn.Module) -> Iterator[None]:
    """Inside, the module's parameters are the parts that this rank holds, plain tensors; their gradients are the
    parameters'."""
    _enter(module)
    try:
        yield
    finally:
        _leave(module)


def _enter(module: nn.Module) -> None:
    """Found before the parameter by whoever reads `module.weight`; what asks for parameters does not see it."""
    for name, param in module._parameters.items():
        if param is not None:
            module.__dict__[name] = computed_part(param) if isinstance(param, DTensor) else param


def _leave(module: nn.Module, *_: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)

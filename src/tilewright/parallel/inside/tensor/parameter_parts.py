"""Parts of parameters, and of 8-bit codes, in the place of the whole ones: DTensors for what stores and updates them,
plain tensors for the module while it runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tilewright.memory.offload.lazy_params import is_placeholder
from tilewright.ops.base.code_modules import HoldsCodes
from tilewright.ops.base.tensor_parts import computed_part

T = TypeVar("T", bound=Tensor)
Cut = Callable[[Tensor, int], Tensor]
"""This rank's part of a tensor along a dim, a parameter where that is one."""
ADAPTERS = {0: ("lora_B", "lora_A"), 1: ("lora_A", "lora_B")}
"""By the dim along which a weight is cut: the matrix of its adapter that is cut along it too, and the one that all
ranks have, and each a part of the gradient of."""
_HANDLES = "hooks_of_parts"
"""Attribute of a module: of its hooks."""
_WAITING = "codes_in_parts"
"""Attribute of a module that runs: its codes as DTensors."""


@torch.no_grad()
def part_along(mesh: DeviceMesh, whole: T, dim: int) -> T:
    """This rank's part of a tensor along a dimension; a parameter where it is one.

    Args:
        mesh: of one axis.
        whole: on meta, or with memory; of a placeholder the part is on meta.
        dim: along which it is cut; comes out even.
    """
    seen = whole.to("meta") if is_placeholder(whole) else whole
    local = seen.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
    shape, stride = whole.shape, torch.empty(whole.shape, device="meta").stride()
    return _like(whole, DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride))


def shape_along(parts: int, whole: Tensor, dim: int) -> Tensor:
    """A tensor of the shape of a parameter's part, without memory; a parameter where `whole` is one.

    Args:
        parts: how many there are.
        whole: the tensor.
        dim: along which it is cut; comes out even.

    Example:
        >>> shape_along(2, nn.Parameter(torch.ones(4, 6)), 1).shape
        torch.Size([4, 3])
    """
    shape = [size // parts if place == dim else size for place, size in enumerate(whole.shape)]
    return _like(whole, torch.empty(shape, dtype=whole.dtype, device="meta"))


def _like(whole: T, part: Tensor) -> T:
    """A part of a parameter as what the whole tensor is."""
    if not isinstance(whole, nn.Parameter):
        return cast(T, part)
    param = nn.Parameter(part, whole.requires_grad)
    vars(param).update(vars(whole))
    return cast(T, param)


def keep_parts(module: nn.Module, dims: Mapping[str, int], cut: Cut, made: dict[Tensor, Tensor]) -> None:
    """Keep this rank's parts of a module's parameters, in place; its adapter and its codes are cut as its weight is.

    Args:
        module: of the parameters.
        dims: along which each is cut, by name; `weight` among them.
        cut: makes a part.
        made: parts by whole tensor, of all modules: tied ones stay tied.
    """

    def part(whole: Tensor, dim: int) -> Tensor:
        if whole not in made:
            made[whole] = cut(whole, dim)
        return made[whole]

    for name, dim in {**dims, ADAPTERS[dims["weight"]][0]: dims["weight"]}.items():
        whole = module._parameters.get(name)
        if whole is not None:
            module._parameters[name] = part(whole, dim)  # type: ignore[assignment]  # a parameter, as the whole one
    if isinstance(module, HoldsCodes):
        for attribute in module.code_attributes.values():
            vars(module)[attribute] = part(vars(module)[attribute], dims["weight"])


def adapter_on_all(module: nn.Module, dim: int) -> tuple[str, ...]:
    """The parameter of a module's adapter that all ranks have, and each a part of the gradient of; none without one.

    Args:
        module: whose weight is cut.
        dim: along which.
    """
    name = ADAPTERS[dim][1]
    return (name,) if module._parameters.get(name) is not None else ()


def run_on_parts(module: nn.Module, hidden: tuple[str, ...] = (), layers: Sequence[str] = ()) -> None:
    """Let a module compute on the parts of its parameters that are here.

    Args:
        module: with parameters from `part_along`, maybe sharded further.
        hidden: parameters that it computes without.
        layers: names of modules inside of it, where these have the parameters, and nothing but the module's call calls
            them: their own hooks are taken off.
    """

    def holders(module: nn.Module) -> list[nn.Module]:
        # By name: a copy of the module has its own, and these hooks.
        return [module.get_submodule(name) for name in layers] or [module]

    def enter(module: nn.Module, _: Any) -> None:
        for one in holders(module):
            _enter(one)
            one.__dict__.update(dict.fromkeys(hidden))

    def leave(module: nn.Module, *_: Any) -> None:
        for one in holders(module):
            _leave(one)

    if layers:
        for one in holders(module):
            for handle in one.__dict__.pop(_HANDLES, ()):
                handle.remove()
    module.__dict__[_HANDLES] = (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    )


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
    """Enter a module with its parts of parameters, found before the parameter by whoever reads `module.weight`; what
    asks for parameters does not see it. Codes are attributes, which wait elsewhere meanwhile."""
    held = module.__dict__
    for name, param in module._parameters.items():
        if param is not None:
            held[name] = computed_part(param) if isinstance(param, DTensor) else param
    codes = {name: held[name] for name in module.code_attributes.values()} if isinstance(module, HoldsCodes) else {}
    parts = {name: code.to_local() for name, code in codes.items() if isinstance(code, DTensor)}
    if parts:
        held[_WAITING] = codes
        held.update(parts)


def _leave(module: nn.Module) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)
    module.__dict__.update(module.__dict__.pop(_WAITING, {}))

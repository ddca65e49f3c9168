"""Gradients as lists that torch's foreach kernels take: dense values, of one kind in a list."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from tilewright.core.config.sections.parallel import EXPERT_SHARDS


def gradient_values(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Values of all gradients, each once: whole tensors of a device in one list, those sharded over a mesh in another.
    To change them in place is to change the gradients.

    Sparse gradients are coalesced, so that each element has one value. Sharded ones that are still to be summed over
    ranks are summed: parts have neither the norm nor the infinities of their sum.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.tensor([3.0, 4.0])
        >>> gradient_values([weight, weight, torch.nn.Parameter(torch.ones(3))])
        [[tensor([3., 4.])]]
    """
    lists: dict[torch.device | DeviceMesh, list[Tensor]] = {}
    seen: set[int] = set()
    for param in params:
        grad = param.grad
        if grad is None or id(grad) in seen:
            continue
        if grad.is_sparse and not grad.is_coalesced():
            param.grad = grad = grad.coalesce()
        elif isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            whole = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            param.grad = grad = grad.redistribute(placements=whole)
        seen.add(id(grad))
        kind = grad.device_mesh if isinstance(grad, DTensor) else grad.device
        lists.setdefault(kind, []).append(grad._values() if grad.is_sparse else grad)
    return list(lists.values())


def total_norm(
    lists: list[list[Tensor]], row: dist.ProcessGroup | None = None, experts: dist.ProcessGroup | None = None
) -> float:
    """The Euclidean norm of all gradients together, over all ranks where they are sharded.

    Args:
        lists: from `gradient_values`.
        row: ranks that have other values, which count too; None where there are none.
        experts: ranks that have other values in lists of experts (sharded over `efsdp`), and the same in the
            others.
    """
    norms = [_norm(values) for values in lists]
    device = lists[0][0].device if lists else torch.device("cpu")
    if experts is not None:
        spread = [_of_experts(values) for values in lists]
        own = math.hypot(*(norm for norm, other in zip(norms, spread, strict=True) if other))
        norms = [norm for norm, other in zip(norms, spread, strict=True) if not other]
        norms.append(_joined(own, experts, device))
    norm = math.hypot(*norms)
    return norm if row is None else _joined(norm, row, device)


def _norm(values: list[Tensor]) -> float:
    """Norm of one list of gradients, over all ranks. What several axes of a mesh cut is joined along one after the
    other, as torch would with a warning for each rank."""
    axes = {_cut_along(value) for value in values if isinstance(value, DTensor)}
    first = values[0]
    if isinstance(first, DTensor) and len(axes) == 1 and len(along := next(iter(axes))) > 1:
        local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        found = float(torch.nn.utils.get_total_norm(local, foreach=True))
        for axis in along:
            found = _joined(found, first.device_mesh.get_group(axis), local[0].device)
        return found
    norm = torch.nn.utils.get_total_norm(values, foreach=True)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _cut_along(value: DTensor) -> tuple[int, ...]:
    """Axes of the mesh along which ranks hold different parts of this gradient, whose norm sums over them."""
    return tuple(axis for axis, placement in enumerate(value.placements) if type(placement) is not Replicate)


def _joined(norm: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """Join the norms of a group's ranks, each over its own gradients, to the norm over all."""
    square = torch.tensor(norm * norm, dtype=torch.float64, device=device)
    dist.all_reduce(square, group=group)
    return math.sqrt(square)


def _of_experts(values: list[Tensor]) -> bool:
    """True if gradients are of experts: other ranks hold other experts' values, which their mesh does not show."""
    axes = (values[0].device_mesh.mesh_dim_names or ()) if isinstance(values[0], DTensor) else ()
    return EXPERT_SHARDS in axes and "ep" not in axes


def all_finite(values: list[Tensor]) -> Tensor:
    """True if all gradients of one list are finite, a 0-dim boolean tensor; over all ranks where they are sharded.

    Waits for no device. The largest magnitude of a tensor is finite only if all of it is, and one kernel takes all.
    """
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    local = [value.float() if value.itemsize == 1 else value for value in local if value.numel()]  # codes have no norm
    norms = [norm.float() for norm in torch._foreach_norm(local, float("inf"))] if local else []
    device = local[0].device if local else values[0].device
    finite = torch.stack(norms).isfinite().all() if norms else torch.ones((), dtype=torch.bool, device=device)
    if not isinstance(values[0], DTensor):
        return finite
    mesh = values[0].device_mesh
    return DTensor.from_local(finite.float(), mesh, [Partial("min")] * mesh.ndim).full_tensor() > 0


def found_inf(params: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """True if a gradient holds an infinity or NaN: a 0-dim boolean tensor, without waiting for the device.

    Args:
        params: parameters; those without a gradient are left out.
        group: ranks that must agree, as those that hold shards of the same tensors must: True on all where it is on
            one. Ranks of a DTensor's mesh agree by themselves.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.tensor([1.0, float("inf")])
        >>> found_inf([weight])
        tensor(True)
    """
    params = list(params)
    return any_not_finite(gradient_values(params), params[0].device if params else torch.device("cpu"), group)


def any_not_finite(lists: list[list[Tensor]], device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """True if one of the gradients that `gradient_values` gave is not finite: a 0-dim boolean tensor; on `device` where
    there are none."""
    finite = [all_finite(values) for values in lists]
    if finite:
        bad = ~torch.stack([flag.to(finite[0].device) for flag in finite]).all()
    else:
        bad = torch.zeros((), dtype=torch.bool, device=device)
    if group is not None:
        count = bad.to(torch.float32)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
        bad = count > 0
    return bad

"""A model cut over ranks by torch's FSDP2: layer by layer, then what is outside of the layers.

    convert(model, policy)  # first: dtypes of parameters are settled before they are cut
    shard(model, model.layers, world.fsdp_mesh, Sharding())

Each rank keeps its part of each parameter, of its gradient and of the optimizer's states (DTensors, `Shard(0)`). A
layer's parameters are gathered before its forward pass and again before its backward pass. Gradients are summed over
the ranks, never averaged: a loss is divided by the targets of all ranks before backward (`executor.standard`).

ZeRO's stages in FSDP2's terms: 3 is `reshard_after_forward`, 2 is without it; with `reduce_each` gradients are in parts
between the micro-batches of a step too, without it they are whole there and reduced once per step, as in stage 1.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from tilewright.core.errors import ConfigError
from tilewright.parallel.inside.experts.rank_experts import expert_meshes
from tilewright.precision.assign.conversion_plan import decide_all
from tilewright.precision.assign.gather_dtype import AsRead, param_groups, settle

LOW_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded by FSDP2."""

    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass (ZeRO-3). False keeps them until its backward pass is
    done (ZeRO-2): one gather per micro-batch, not two."""
    cpu_offload: bool = False
    """Keep parts of parameters, gradients and states in host memory, where the update runs too."""


def shard(model: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shard a model over the ranks of a mesh by FSDP2, in place. Its parameters are new: make the optimizer afterwards.

    One layer is one group, whose parameters are gathered together; what is outside of the layers is another. FSDP2
    takes one dtype per group, so modules whose trained parameters have another (norms and routers in FP32 beside
    matrices in BF16) are groups of their own.

    Args:
        model: a `protocols.Model`, converted; on the mesh's device, or on meta (then call `ready` once it is filled).
        layers: of it; empty where none were found: the model is one group then.
        mesh: of one axis, or (copies, shards); that of experts which are spread is their own (`experts.rank_experts`).
        sharding: how.

    Raises:
        ConfigError: a parameter belongs to several layers, so no group could own it.
    """
    _check_not_shared(model, layers)
    on_gpu = mesh.device_type != "cpu"
    settings: dict[str, Any] = {
        "mesh": mesh,
        "shard_placement_fn": _placement(expert_meshes(model)),
        # Formats are the layers' own affair. Gradients are FP32 as on one rank, also those of 16-bit parameters.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if sharding.cpu_offload else OffloadPolicy(),
    }
    # FSDP2 has no zeros in FP32 for what was gathered in 16 bits and not used (`takes_unused`).
    as_read = getattr(model, "uses_every_parameter", False)
    of_layers = AsRead(**vars(settings["mp_policy"])) if as_read else settings["mp_policy"]
    for layer in layers:
        _shard_group(layer, settings | {"mp_policy": of_layers}, reshard=sharding.reshard_after_forward)
    # None lets torch keep the root's parameters until backward, which begins with them.
    _shard_group(model, settings, reshard=None if sharding.reshard_after_forward else False)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if takes_unused():  # Zeros would be 16-bit beside gradients in FP32.
            module.set_reduce_scatter_unused_params(not _has_low(cast(nn.Module, module)))
    for name in getattr(model, "forward_methods", ()):
        register_fsdp_forward_method(model, name)
    if not any(param.is_meta for param in model.parameters()):
        ready(model)


def _placement(meshes: Mapping[nn.Parameter, DeviceMesh]) -> Callable[[nn.Parameter], Any] | None:
    """The placement of shards: `shard_placement_fn` of FSDP2, which has no public name for what it returns."""
    if not meshes:
        return None
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    infos = {
        mesh: HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0) if mesh.ndim == 2 else FSDPMeshInfo(mesh, 0)
        for mesh in set(meshes.values())
    }
    return lambda param: ShardPlacementResult(Shard(0), infos[meshes[param]]) if param in meshes else None


def takes_unused() -> bool:
    """True if this torch's FSDP2 can shard a parameter that one rank alone uses in a step. That of 2.11 does not: its
    ranks would reduce different tensors. Models of this package use each parameter on every rank (an expert without
    tokens runs on no rows), so only a custom model can meet this."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def ready(model: nn.Module) -> None:
    """Finish sharding a model that was on the meta device, once its parts have memory: the last step of `shard`.

    Gradients of 16-bit parameters are FP32, whole and in parts. FP32 ones of a converted model are gathered as they are
    read (`precision.assign.gather_dtype`).
    """
    low = any(param.dtype in LOW_DTYPES for param in model.parameters())
    report = getattr(model, "precision_report", None)
    if low or report is not None:
        # Of the root first: it must be the one that begins. An uneven part is copied into one with padding, so what
        # needs none of this leaves that to the first step.
        fully_shard.state(model)._lazy_init()
    if low:
        _give_fp32_gradients_to_all(model)
    if report is not None:
        settle(model, decide_all(model, report.policy).sites)


def _give_fp32_gradients_to_all(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        module.unshard()
        _give_fp32_gradients(cast(nn.Module, module))
        module.reshard()
    _give_fp32_gradients(model)
    keep_fp32_sums(model)


def _give_fp32_gradients(module: nn.Module) -> None:
    for param in module.parameters():
        if param.dtype in LOW_DTYPES:
            param.grad_dtype = torch.float32


def keep_fp32_sums(model: nn.Module) -> None:
    """Let FSDP2 keep a sharded model's sums of gradients in FP32, which it would cast to the parameter's dtype.

    What it casts to is decided by each `unshard()` and has no public setting.
    """
    for module in fsdp_modules(model):
        for group in param_groups(module):
            if getattr(group, "_orig_dtype", None) in LOW_DTYPES:  # it has one after its first unshard
                group._orig_dtype = torch.float32


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The groups of a sharded model, the model first; none of one that is not sharded. Of a model in stages each stage
    is a first one (`pipeline.rank_stages`)."""
    roots = [*getattr(model, "stages", ()), *model.modules()]
    return (module for module in roots if isinstance(module, FSDPModule))


def is_sharded(model: nn.Module) -> bool:
    """True if `shard` has cut the model."""
    return next(fsdp_modules(model), None) is not None


def in_parts(model: nn.Module) -> bool:
    """True if shards or other parts of the model's parameters are on ranks, whatever has cut them."""
    return any(isinstance(param, DTensor) for param in model.parameters())


def share_parts(model: nn.Module) -> None:
    """Let FSDP2 groups that hold one tied parameter share its part: each gathers it for itself, and their gradients are
    added up in it.

    Args:
        model: sharded, no group put together. Modules that share a parameter have the same object.
    """
    parts: dict[nn.Parameter, Any] = {}
    for held in (
        held for module in fsdp_modules(model) for group in param_groups(module) for held in group.fsdp_params
    ):
        param = getattr(held._module_info.module, held._module_info.param_name)
        if param in parts:  # before it is looked at: an uneven part would be copied into one with padding again
            held._sharded_param_data = parts[param]._sharded_param_data
        held.reset_sharded_param()
        parts.setdefault(param, held)


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that forward passes without a backward pass have left gathered."""
    for module in fsdp_modules(model):
        module.reshard()


class WholeBytes:
    """Counts what FSDP2 has put together for a while, for which it has no public names.

    Args:
        model: from `shard`, filled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._groups: list[Any] = [group for module in fsdp_modules(model) for group in param_groups(module)]

    def __call__(self) -> dict[str, int]:
        """Bytes that this rank has in addition to its shards: whole parameters, their whole gradients, and parts of
        gradients that no parameter has yet, because copies of the shards add them after the last pass."""
        waiting = [group._partial_reduce_output for group in self._groups]
        found = {"parameters": 0, "gradients": sum(part.nbytes for part in waiting if part is not None)}
        for param in (param for group in self._groups for param in group.fsdp_params):
            found["parameters"] += sum(out.untyped_storage().nbytes() for out in param.all_gather_outputs)
            whole = getattr(param, "_unsharded_param", None)
            grads = param.unsharded_accumulated_grad, None if whole is None else whole.grad
            found["gradients"] += sum(grad.nbytes for grad in grads if grad is not None)
        return found


def _shard_group(module: nn.Module, settings: dict[str, Any], *, reshard: bool | None) -> None:
    for part in _of_other_dtypes(module):
        fully_shard(part, reshard_after_forward=False, **settings)  # small: kept until backward
    fully_shard(module, reshard_after_forward=reshard, **settings)


def _of_other_dtypes(module: nn.Module) -> list[nn.Module]:
    """Find the parts of a module whose trained parameters have another dtype than most that are in no group yet: they
    are sharded apart."""
    own = {part: [p for p in part.parameters(recurse=False) if p.requires_grad] for part in _ungrouped(module)}
    sizes: Counter[torch.dtype] = Counter()
    for params in own.values():
        for param in params:
            sizes[param.dtype] += param.numel()
    most = max(sizes, key=sizes.__getitem__, default=None)
    return [part for part, params in own.items() if params and most not in {param.dtype for param in params}]


def _ungrouped(module: nn.Module) -> Iterator[nn.Module]:
    """Modules within this one, and itself, that no group has taken yet."""
    if isinstance(module, FSDPModule):
        return
    yield module
    for child in module.children():
        yield from _ungrouped(child)


def _has_low(module: nn.Module) -> bool:
    params = [param for param in module.parameters() if param.requires_grad]
    return any(param.dtype in LOW_DTYPES for param in params)


def _check_not_shared(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    inside = [param for layer in layers for param in set(layer.parameters())]
    held = {id(module) for layer in layers for module in layer.modules()}
    outside = {p for module in model.modules() if id(module) not in held for p in module.parameters(recurse=False)}
    shared = len(inside) - len(set(inside)) + len(outside.intersection(inside))
    if shared:
        raise ConfigError(
            "Model whose layers share parameters cannot be sharded",
            got=f"{shared} parameters that belong to several layers",
            need="layers with parameters of their own",
            try_="--parallel.dp_shard 1 --parallel.dp_replicate -1, a copy of the model on each process",
            where="parallel.dp_shard",
        )

"""The dtype in which the parts of a sharded model's weights are gathered: 16 bits where layers read no more of them.

A linear layer that multiplies in 16 bits casts its weight first. The same bits come of parts that each rank casts and
then gathers: half of the bytes, and no copy of the weight beside it. All else is gathered as it is stored: what is
computed in FP32 (an evaluation too), quantised (8-bit codes of a rounded weight are others), or read in another way;
embedding and head, whose gradients are summed in FP32; and where kernels give more than 16 bits of a weight's gradient.

Optimizer, checkpoints and exports have the parts, which are FP32 always. `convert`, `set_mode` and `evaluating` settle
the dtypes again; a planner asks `narrow_weights` too.

`reads_codes` says which weights may travel as codes (`parallel.param_gather`), `coded_weights` the same before a run.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from tilewright.formats.spec import SPECS
from tilewright.formats.tiled import FP8_BLOCK
from tilewright.ops.backends.native.wide import widens
from tilewright.ops.kernels import Kernels
from tilewright.precision.assign.module_kinds import Handling, ModuleSite
from tilewright.precision.float8.linear import Float8Linear
from tilewright.precision.mixed.cast_layers import CastLinear, plain_layer
from tilewright.precision.policy.gemm_formats import Gemms
from tilewright.precision.policy.policy import FormatDecision

NARROW = (torch.float16, torch.bfloat16)
Decisions = Iterable[tuple[ModuleSite, FormatDecision]]


class AsRead(MixedPrecisionPolicy):
    """The dtypes of FSDP2's groups, which `settle` sets one by one; by itself it gathers parameters as they are
    stored."""


def narrow_weights(sites: Decisions, device_type: str, kernels: Kernels | None = None) -> dict[nn.Module, torch.dtype]:
    """Linear layers that read 16 bits of each element of their weight, and give its gradient in as many, so that ranks
    gather it so.

    Args:
        sites: modules, and what is decided for each.
        device_type: where they compute.
        kernels: of layers that have none of their own yet; None: layers take torch's own linear.
    """
    found = {}
    for site, decision in sites:
        linear = site.handling is Handling.SWAP and plain_layer(site.module) in (nn.Linear, CastLinear)
        if not linear or decision.gemms is not None or decision.to_integers:
            continue
        dtype, own = SPECS[decision.operands].dtype, getattr(site.module, "kernels", None) or kernels
        if dtype in NARROW and _rounds_gradient(own, device_type, dtype):
            found[site.module] = dtype
    return found


def coded_weights(sites: Decisions, *, power_of_two: bool) -> set[nn.Module]:
    """Linear layers whose weights can be gathered as codes: their matmuls read only E4M3 codes under power-of-two
    scales per 128x128.

    Args:
        sites: modules, and what is decided for each.
        power_of_two: scales are, in this policy.
    """
    swapped = [(site.module, one.gemms) for site, one in sites if site.handling is Handling.SWAP and one.gemms]
    return {module for module, gemms in swapped if power_of_two and _in_blocks(gemms)}


def reads_codes(module: nn.Module) -> bool:
    """True where a layer as it is now reads codes, so that these can be gathered."""
    return isinstance(module, Float8Linear) and module.power_of_two and _in_blocks(module.gemms)


def _in_blocks(gemms: Gemms) -> bool:
    return all(one.operands is not None and one.operands.weight == FP8_BLOCK for one in (gemms.fprop, gemms.dgrad))


def _rounds_gradient(kernels: Kernels | None, device_type: str, dtype: torch.dtype) -> bool:
    return kernels.rounds_gradient(device_type, dtype) if kernels is not None else not widens(device_type, dtype)


def param_groups(module: FSDPModule) -> list[Any]:
    """FSDP2's groups of a module's own parameters that are gathered, for which it has no public names: a list, in torch
    2.11 one or None."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]


def _settled_groups(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    for module in model.modules():
        for group in param_groups(module) if isinstance(module, FSDPModule) else ():
            if isinstance(group.mp_policy, AsRead):
                yield module, group


def settle(model: nn.Module, sites: Decisions) -> None:
    """Set the dtype in which each sharded parameter is gathered to that in which it is read. Nothing is sent, and
    nothing happens to a model that is not sharded by `parallel.shard`, or not ready yet.

    Args:
        model: between steps.
        sites: modules, and what is decided for each.
    """
    for module in model.modules():  # what a pass without backward has left together is of the formats before
        if isinstance(module, FSDPModule):
            module.reshard()
    groups = [(module, group) for module, group in _settled_groups(model) if hasattr(group, "_orig_dtype")]
    if not groups:
        return
    narrow = narrow_weights(sites, groups[0][1].device.type)
    for _, group in groups:
        dtypes = [
            narrow.get(param._module_info.module) if param._module_info.param_name == "weight" else None
            for param in group.fsdp_params
        ]
        one = next(filter(None, dtypes), None)  # FSDP2 casts all of a group that it casts to one dtype
        wanted = [dtype if dtype == one and dtype != param.orig_dtype else None
                  for param, dtype in zip(group.fsdp_params, dtypes, strict=True)]  # fmt: skip
        if wanted != [param.param_dtype for param in group.fsdp_params]:
            for param, dtype in zip(group.fsdp_params, wanted, strict=True):
                _gather_as(param, dtype)


def _gather_as(param: Any, dtype: torch.dtype | None) -> None:
    """Let a sharded parameter be gathered in this dtype, None for its own; its gradient is FP32."""
    if dtype == param.param_dtype:
        return
    param.param_dtype, param.all_gather_outputs = dtype, []
    vars(param).pop("_unsharded_param", None)  # FSDP2 makes one, and memory for it, where there is none
    if dtype is not None:
        ranks = param.mesh_info.shard_mesh_size
        param.init_all_gather_outputs([param.padded_sharded_param_size.numel()], [dtype], ranks, param.device)
        param.init_unsharded_param()
        param.unsharded_param.grad_dtype = torch.float32
        param.free_unsharded_param()

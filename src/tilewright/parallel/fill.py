"""A model from the meta device onto shards: each rank draws or reads the rows of its parts, and no others.

The first weights are bitwise those of one process. A rank holds its parts and a block of some megabytes; what it reads
and draws beyond its rows, and where a whole parameter passes by, is `InitialValues`' matter (`models.decoder.init`,
`models.layerwise.lazy_init`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.models.base.protocols import InitialValues
from tilewright.parallel.shard import Sharding, ready, shard


@torch.no_grad()
def shard_from_meta(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: Sharding,
    values: InitialValues,
    device: torch.device,
    *,
    fresh: bool = True,
    before_gather: Callable[[], None] | None = None,
) -> None:
    """Shard a model without memory, and fill its parts and buffers.

    Args:
        model: converted, on the meta device.
        layers, mesh, sharding: see `shard`.
        values: initial values; asked for this rank's rows of one parameter at a time, on the host.
        device: of the model.
        fresh: False leaves parameters unfilled, for a checkpoint. Buffers, which it may not hold, are filled.
        before_gather: called once this rank's parts are filled. Ranks read for as long as their disks take, and a
            collective waits no longer than its timeout.

    Raises:
        ConfigError: see `shard`.
    """
    to_placeholders(model, device)
    fill_buffers(model, values)
    home = torch.device("cpu") if sharding.cpu_offload else device
    parts: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        shape = (len_of_part(len(param), mesh), *param.shape[1:])
        part = parts[name] = torch.empty(shape, dtype=param.dtype, device=home)
        if fresh and len(part):
            on_host = part if part.device.type == "cpu" else torch.empty(shape, dtype=param.dtype)
            values({name: on_host}, {name: first_of_part(len(param), mesh)})
            part.copy_(on_host)
    _renew(model, lambda name, param: torch.empty(param.shape, dtype=param.dtype, device="meta"))
    shard(model, layers, mesh, sharding)
    _renew(model, lambda name, param: _with_local(param, parts.pop(name)))
    if before_gather is not None:
        before_gather()
    ready(model)


def first_of_part(rows: int, mesh: DeviceMesh) -> int:
    """First row of this rank's part of a tensor that is cut along its first dim."""
    return min(rows, -(-rows // mesh.size(-1)) * mesh.get_local_rank(mesh.ndim - 1))


def len_of_part(rows: int, mesh: DeviceMesh) -> int:
    """Rows of this rank's part: the last ranks have fewer, or none, where they do not come out even."""
    first = first_of_part(rows, mesh)
    return min(rows, first + -(-rows // mesh.size(-1))) - first


def _with_local(param: DTensor, part: Tensor) -> DTensor:
    """The same sharded tensor with memory."""
    where = {"shape": param.shape, "stride": param.stride(), "run_check": False}
    return DTensor.from_local(part, param.device_mesh, param.placements, **where)


def _renew(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Put other parameters in the place of a model's; tied ones stay tied."""
    made = {}
    for name, param in model.named_parameters():
        made[param] = nn.Parameter(make(name, param), param.requires_grad)
        made[param].__dict__.update(param.__dict__)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = made[param]

"""A model from the meta device onto shards: each rank draws or reads the rows that its parts are in, and no others.

The first weights are bitwise those of one process. A rank holds its parts and a block of some megabytes; what it reads
and draws beyond its rows, and where a whole parameter passes by, is `InitialValues`' matter (`models.decoder.init`,
`models.layerwise.lazy_init`).
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.ops.base.tensor_parts import TensorPart, part_of, rows_of, sharded_like
from tilewright.parallel.inside.experts.rank_experts import expert_meshes
from tilewright.parallel.pipeline.stage_base import ModelStage
from tilewright.parallel.shard import Sharding, ready, shard, share_parts

ROWS_BYTES = 16 * 2**20
"""Of whole rows, from which columns are cut."""


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
    stages: Sequence[ModelStage] = (),
) -> None:
    """Shard a model without memory (on meta), and fill its shards and buffers.

    Args:
        model: converted, on the meta device; what tensor parallelism has cut there is sharded further.
        layers, mesh, sharding: see `shard`.
        values: initial values; asked for this rank's rows of one parameter at a time, on the host.
        device: of the model.
        fresh: False leaves parameters unfilled, for a checkpoint. Buffers, which it may not hold, are filled.
        before_gather: called once this rank's parts are filled. Ranks read for as long as their disks take, and a
            collective waits no longer than its timeout.
        stages: of the model, where each is sharded for itself; `layers` means nothing then.

    Raises:
        ConfigError: see `shard`.
    """
    cut = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    own_mesh = expert_meshes(model)
    meshes = {name: own_mesh.get(param, mesh) for name, param in model.named_parameters()}
    to_placeholders(model, device)
    fill_buffers(model, values)
    home = torch.device("cpu") if sharding.cpu_offload else device
    held: dict[str, Tensor] = {}
    for name, param in model.named_parameters():  # before they are cut: initial values may ask for whole modules
        left = part_of(cut.get(name, param))
        over = meshes[name]
        part = left.some_rows(rows_of(left.sizes[0], over.size(-1), over.get_local_rank(over.ndim - 1)))
        own = held[name] = torch.empty(part.sizes, dtype=param.dtype, device=home)
        if fresh and own.numel():
            on_host = own if own.device.type == "cpu" else torch.empty(part.sizes, dtype=param.dtype)
            fill_part(values, name, on_host, part)
            own.copy_(on_host)
    _renew(model, lambda name, param: _without_memory(param, cut.get(name)))
    shard_all(model, layers, mesh, sharding, stages)
    _renew(model, lambda name, param: sharded_like(held.pop(name), param.shape, cast(DTensor, param)))
    if stages:
        share_parts(model)
    if before_gather is not None:
        before_gather()
    for root in stages or (model,):
        ready(root)


def shard_all(
    model: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    sharding: Sharding,
    stages: Sequence[ModelStage] = (),
) -> None:
    """Shard all before filling: `shard` of a model, or of each of its stages, whose ends may be tied."""
    for stage in stages:
        shard(stage, list(stage.layers), mesh, sharding)
    if stages:
        cast(Model, model).tie_weights()  # what has stages is one
        share_parts(model)
    else:
        shard(model, layers, mesh, sharding)


@torch.no_grad()
def fill_from_meta(model: nn.Module, values: InitialValues, device: torch.device, *, fresh: bool = True) -> None:
    """Give a model on the meta device its memory and values where ranks hold no shards: a rank's stages, and its parts
    of matrices that tensor parallelism has cut.

    Args:
        model, values, device, fresh: see `shard_from_meta`.
    """
    cut = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    to_placeholders(model, device)
    fill_buffers(model, values)

    def held(name: str, param: nn.Parameter) -> Tensor:
        part = part_of(cut.get(name, param))
        out = torch.empty(part.sizes, dtype=param.dtype)
        if fresh and name in cut:
            fill_part(values, name, out, part)
        elif fresh:
            values({name: out})
        return sharded_like(out.to(device), param.shape, cut[name]) if name in cut else out.to(device)

    _renew(model, held)


def fill_part(values: InitialValues, name: str, out: Tensor, part: TensorPart) -> None:
    """Fill a shard: read or draw the values of this rank's part of a parameter. For columns, whole rows are read, some
    at a time.

    Args:
        values: initial values.
        name: of the parameter.
        out: of the part's shape, on the host, contiguous.
        part: of the parameter.
    """
    if part.is_rows:
        values({name: out}, {name: part.rows.start} if out.ndim else {})
        return
    row_bytes = out.element_size() * prod(part.shape[1:])
    step = max(1, ROWS_BYTES // row_bytes)
    for start in range(0, len(out), step):
        rows = part.rows[start : start + step]
        whole = torch.empty((len(rows), *part.shape[1:]), dtype=out.dtype)
        values({name: whole}, {name: rows.start})
        out[start : start + len(rows)] = whole[(slice(None), *part.slices[1:])]


def _without_memory(param: nn.Parameter, cut: DTensor | None) -> Tensor:
    """Make a parameter on the meta device, cut in the parts that it had, before its shards are filled."""
    sizes = param.shape if cut is None else part_of(cut).sizes
    made = torch.empty(sizes, dtype=param.dtype, device="meta")
    return made if cut is None else sharded_like(made, param.shape, cut)


def _renew(model: nn.Module, make: Callable[[str, nn.Parameter], Tensor]) -> None:
    """Renew a model's parameters for filled shards; tied ones stay tied."""
    made = {}
    for name, param in model.named_parameters():
        made[param] = nn.Parameter(make(name, param), param.requires_grad)
        made[param].__dict__.update(param.__dict__)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = made[param]

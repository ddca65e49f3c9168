"""The one place in which a model is cut over ranks: each kind of parallelism is a line here, in the order of the lines.

    convert(model, policy)  # first: dtypes of parameters are settled before they are cut
    model = parallelize(model, world, recipe.parallel, device=device)
    optimizer = ...  # parameters are new objects

Layers go to stages first; what cuts inside of a layer (tensors, experts) comes before FSDP2, which shards what the
others have left on a rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from tilewright.core.config.recipe import ParallelSection
from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.models.base.protocols import InitialValues, Model, TrainableModel
from tilewright.models.decoder.decoder import Decoder
from tilewright.models.hf.model import HFModel
from tilewright.parallel.fill_shards import fill_from_meta, shard_all, shard_from_meta
from tilewright.parallel.inside.experts.rank_experts import has_experts, hold_experts
from tilewright.parallel.inside.experts.redundant_experts import held_before
from tilewright.parallel.inside.tensor.compile_layers import compile_cut
from tilewright.parallel.inside.tensor.cut_decoder import check_tensors, cut_tensors
from tilewright.parallel.pipeline.hf_stages import StagedHF
from tilewright.parallel.pipeline.rank_stages import StagedDecoder, hold_stages
from tilewright.parallel.pipeline.stage_base import ModelStage, Staged
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import Group, World


def parallelize(
    model: Model,
    world: World,
    section: ParallelSection,
    *,
    device: torch.device,
    values: InitialValues | None = None,
    fresh: bool = True,
) -> Model:
    """Cut a model over the ranks and return this rank's part. It is the model itself where ranks hold shards or copies
    of all layers: nothing is put around it.

    Args:
        model: converted.
        world: who holds what.
        section: how.
        device: where the model computes.
        values: of a model without memory: each rank makes those of its parts. None where the model has its values.
        fresh: False where a checkpoint overwrites the parts, which are not filled then.

    Raises:
        ConfigError: a model that cannot be sharded, or has no stages, no experts, or matrices that cannot be cut.
        HardwareError: this torch shards no experts apart.
    """
    world = replace(world, copies_apart=section.grad_sync != "fp32")
    stages: tuple[ModelStage, ...] = ()
    apart = world.sizes.ep > 1 or (world.sizes.tp > 1 and has_experts(model))  # of the whole: a stage may have none
    if world.sizes.tp > 1:
        check_tensors(model, world.sizes)
    if world.sizes.pp > 1:
        staged = in_stages(model, Pipeline.of(section), world.row, device, values)
        model, stages = cast(Model, staged), staged.stages
    if apart:
        redundant = section.redundant_experts
        hold_experts(model, world, section.dispatch, section.expert_order, redundant=redundant)
    if world.sizes.tp > 1:
        cut_tensors(model, world, sequence_parallel=section.sequence_parallel)
    mesh, wait = world.fsdp_mesh_beside(apart), world.wait_for_all
    sharding = Sharding(section.reshard_after_forward, section.cpu_offload)
    if mesh is None:
        if values is not None and world.holds_parts:
            fill_from_meta(model, values, device, fresh=fresh)
    elif values is None:
        wait()  # ranks read for as long as their disks take
        shard_all(model, model.layers, mesh, sharding, stages)
    else:
        how = {"fresh": fresh, "before_gather": wait, "stages": stages}
        shard_from_meta(model, model.layers, mesh, sharding, values, device, **how)
    return model


def in_stages(
    model: Model, pipeline: Pipeline, row: Group, device: torch.device, values: InitialValues | None
) -> StagedDecoder | StagedHF:
    """Return this rank's layers of a model that is cut into pipeline stages.

    Args:
        model, device, values: see `parallelize`.
        pipeline, row: see `hold_stages`.

    Raises:
        ConfigError: see `hold_stages`.
    """
    if isinstance(model, HFModel) and values is not None:  # it is run to find its layers
        to_placeholders(model, device)
        fill_buffers(model, values)
    return hold_stages(model, pipeline, row)


def compile_layers(model: Model, world: World, *, waits: bool = False) -> None:
    """Compile the layers of what `parallelize` gave; nothing is traced before they run.

    Args:
        model: whole, or this rank's part.
        world: who holds what.
        waits: weight gradients are computed later than those of inputs.
    """
    if world.sizes.tp > 1 and isinstance(model, Decoder):
        compile_cut(model)
    else:
        model.compile_blocks(waits=waits)


def counted_elsewhere(model: Model, world: World) -> frozenset[Tensor]:
    """Parameters of this rank that, in a parallelized model, a rank with other layers or experts has too, which counts
    them where ranks count together."""
    tied = model.counted_elsewhere if isinstance(model, Staged) else frozenset()
    return tied | held_before(model) if world.sizes.ep > 1 else tied


def backward_of(model: TrainableModel, batch: Mapping[str, Tensor], targets: int) -> None:
    """Run forward and backward of a batch's mean loss through a parallelized model, to look at it; no step is made.
    Ranks with other layers all call it.

    Args:
        model: what `parallelize` gave, or any other.
        batch: on the device; the same on ranks with other layers.
        targets: that the loss is the mean of.
    """
    if isinstance(model, Staged):
        model.backward_row(batch, targets)
    else:
        (model.loss(batch).loss_sum / targets).backward()

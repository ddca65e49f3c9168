"""The one place in which a model is cut over ranks: each kind of parallelism is a line here, in the order of the lines.

    convert(model, policy)  # first: dtypes of parameters are settled before they are cut
    parallelize(model, world, recipe.parallel, device=device)
    optimizer = ...  # parameters are new objects

What cuts inside of a layer (tensors, experts) comes before FSDP2, which shards what the others have left on a rank.
"""

import torch

from tilewright.core.config.recipe import ParallelSection
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.parallel.fill import shard_from_meta
from tilewright.parallel.shard import Sharding, shard
from tilewright.parallel.world import World


def parallelize(
    model: Model,
    world: World,
    section: ParallelSection,
    *,
    device: torch.device,
    values: InitialValues | None = None,
    fresh: bool = True,
) -> None:
    """Cut a model over the ranks, in place. Nothing is put around it on one rank, and where each holds a copy.

    Args:
        model: converted.
        world: who holds what.
        section: how.
        device: where the model computes.
        values: of a model without memory: each rank makes those of its parts. None where the model has its values.
        fresh: False where a checkpoint overwrites the parts, which are not filled then.

    Raises:
        ConfigError: a model that cannot be sharded.
    """
    if world.fsdp_mesh is None:
        return
    sharding = Sharding(section.reshard_after_forward, section.cpu_offload)
    if values is None:
        world.wait_for_all()  # ranks read for as long as their disks take
        shard(model, model.layers, world.fsdp_mesh, sharding)
        return
    wait = world.wait_for_all
    shard_from_meta(model, model.layers, world.fsdp_mesh, sharding, values, device, fresh=fresh, before_gather=wait)

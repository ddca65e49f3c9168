"""A run's model on several ranks: built without memory, filled and cut so that no rank ever holds all of it.

    model = build_adapted(..., device="meta" if on_meta(recipe, world) else device)
    values = first_values(recipe, model, world)
    convert(model, policy)
    give_weights(recipe, model, world, device, values, fresh=fresh)  # and now it is sharded, where world says so
    optimizer = make_optimizer(...)  # parameters are new objects

On one rank, and with copies of the whole model on each, nothing is put around the model.
"""

import torch

from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import ConfigError
from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.models.folder.resolve import local_folder
from tilewright.models.layerwise.lazy_init import random_values, stored_values
from tilewright.parallel.fill import shard_from_meta
from tilewright.parallel.shard import Sharding, shard
from tilewright.parallel.world import World
from tilewright.training.components.weights.lora_model import fill_lazy


def on_meta(recipe: Recipe, world: World) -> bool:
    """Whether the model is built on the meta device and gets its bytes from `give_weights`.

    A sharded model with adapters is not: its base is read and encoded as on one rank, and its FP8 codes, which are no
    parameters, stay whole on each.

    Raises:
        ConfigError: shards, and the layer-major executor, whose layers travel whole.
    """
    if not recipe.memory.can.shard and world.fsdp_mesh is not None:
        raise ConfigError(
            "Layer-major executor does not shard",
            got=f'parallel.dp_shard = {world.sizes.dp_shard}, memory.executor = "layer_major"',
            need="copies of the model, each on a process",
            try_=f"--parallel.dp_shard 1 --parallel.dp_replicate {world.size}, or --memory.executor standard",
            where="parallel.dp_shard",
        )
    return recipe.memory.can.offload or (world.fsdp_mesh is not None and not recipe.lora.rank)


def first_values(recipe: Recipe, model: Model, world: World) -> InitialValues | None:
    """What fills a model on the meta device; None where it has its values, or `fill_lazy` gives them.

    Raises:
        CheckpointError: the folder is not whole, or not of this model.
    """
    if not on_meta(recipe, world):
        return None
    if recipe.model.weights == "load":
        return stored_values(model, local_folder(recipe.model.path))
    return random_values(model, recipe.run.seed)


def give_weights(
    recipe: Recipe,
    model: Model,
    world: World,
    device: torch.device,
    values: InitialValues | None,
    *,
    fresh: bool,
    sharding: Sharding | None = None,
) -> None:
    """Give a converted model its memory and first values, and shard it where `world` has shards.

    Args:
        recipe: reads `[model]`, `[lora]`, `[memory]` and the seed.
        model: converted. Its parameters are new objects afterwards: make the optimizer later.
        world: who holds what.
        device: where the model computes.
        values: of `first_values`.
        fresh: False where a checkpoint overwrites the weights: sharded ones are not drawn then.
        sharding: how; of `[parallel]`.

    Raises:
        CheckpointError: the folder cannot be read.
        ConfigError: a model that cannot be sharded.
    """
    mesh, sharding = world.fsdp_mesh, sharding or Sharding()
    if recipe.memory.can.offload:  # parameters get their bytes in the tiers of their layer groups
        if values is None:
            raise AssertionError("first_values gives a layer-major run its values")
        to_placeholders(model, device)
        fill_buffers(model, values)
    elif mesh is None:
        fill_lazy(recipe, model, device)
    elif values is not None:
        wait = world.wait_for_all
        shard_from_meta(model, model.layers, mesh, sharding, values, device, fresh=fresh, before_gather=wait)
    else:
        fill_lazy(recipe, model, device)
        world.wait_for_all()
        shard(model, model.layers, mesh, sharding)

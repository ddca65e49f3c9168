"""Where a run's model gets its first values: at once, layer by layer as it is read, or in the pieces that are kept.

model = build_adapted(..., device="meta" if is_vacant(recipe, world, can) else device)
values = first_values(recipe, model) if ... else None
convert(model, policy)
fill_whole(recipe, model, device, values, world)
parallelize(model, world, recipe.parallel, values=values, ...)  # each rank fills its parts
"""

import torch

from tilewright.core.config.executors import Capabilities
from tilewright.core.config.recipe import Recipe
from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.models.folder.resolve import local_folder
from tilewright.models.layerwise.lazy_init import random_values, stored_values
from tilewright.parallel.world import World
from tilewright.training.components.weights.lora_model import fill_lazy


def is_vacant(recipe: Recipe, world: World, can: Capabilities) -> bool:
    """Whether the model is built on the meta device, and filled in the pieces in which it is kept: layer groups in
    their tiers, parts on ranks.

    A sharded model with adapters is not: its base is read and encoded as on one rank, and its FP8 codes, which are no
    parameters, stay whole on each.
    """
    return can.offload or (world.fsdp_mesh is not None and not recipe.lora.rank)


def first_values(recipe: Recipe, model: Model) -> InitialValues:
    """What fills a vacant model.

    Raises:
        CheckpointError: the folder is not whole, or not of this model.
    """
    if recipe.model.weights == "load":
        return stored_values(model, local_folder(recipe.model.path))
    return random_values(model, recipe.run.seed)


def fill_whole(recipe: Recipe, model: Model, device: torch.device, values: InitialValues | None, world: World) -> None:
    """Values of all that no rank fills in parts, and no executor layer group by layer group.

    Args:
        recipe: reads `[model]` and the seed.
        model: converted. Its parameters are new objects afterwards: make the optimizer later.
        device: where the model computes.
        values: of a vacant model.
        world: who holds what.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    if values is None:
        fill_lazy(recipe, model, device)
    elif world.fsdp_mesh is None:
        to_placeholders(model, device)
        fill_buffers(model, values)

"""A run's model on several ranks: built without memory, filled and cut so that no rank ever holds all of it.

model = build_adapted(..., device="meta" if on_meta(recipe, world) else device)
values = first_values(recipe, model, world)
convert(model, policy)
give_weights(recipe, model, world, device, values, fresh=fresh)  # and now it is sharded, where world says so
optimizer = make_optimizer(...)  # parameters are new objects
"""

import torch

from tilewright.core.config.recipe import Recipe
from tilewright.models.base.protocols import InitialValues, Model
from tilewright.parallel.shard import Sharding
from tilewright.parallel.world import World


def on_meta(recipe: Recipe, world: World) -> bool:
    """Whether the model is built on the meta device and gets its bytes from `give_weights`."""
    raise NotImplementedError


def first_values(recipe: Recipe, model: Model, world: World) -> InitialValues | None:
    """What fills a model on the meta device; None where it has its values, or `fill_lazy` gives them."""
    raise NotImplementedError


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
        fresh: False where a checkpoint overwrites the weights: they are not drawn then.
        sharding: how; of `[parallel]`.
    """
    raise NotImplementedError

"""The memory of a rank of a pipeline: a bound, from the plan of one process with the layers of the rank that holds
most.

It has both ends, embedding and head, though no rank of two has them; and the activations of as many micro-batches as
the schedule has under way on the first rank, as if they were one. Its seconds are those of a rank that never waits.
"""

from collections import Counter
from dataclasses import replace

from tilewright.core.config.change_recipe import changed
from tilewright.core.config.recipe import Recipe
from tilewright.core.memory_plan import memory_plan_of
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.layer_choices import GlobalConfig
from tilewright.planner.model.model_shape import ModelShape
from tilewright.planner.plan import Budget, Plan
from tilewright.planner.planner import Planner

AS_IT_STANDS = "nothing is decided layer by layer for stages of a pipeline yet"
EAGER = "layers are not compiled, since schedule {} computes weight gradients later"
UNEQUAL = "stages get layers by FLOPs, head included: {} layers; parallel.split says another number of each"
NOTE = (
    "bytes are a bound for the rank that holds most: its layers, embedding and head, and the micro-batches under way; "
    "idle time of the pipeline is not in the seconds"
)


def as_it_stands(recipe: Recipe) -> str:
    """Why the stages of a pipeline run as the recipe says, and what `train.compile = "auto"` means for them."""
    eager = recipe.train.compile == "auto" and Pipeline.of(recipe.parallel).defers
    return AS_IT_STANDS + (f"; {EAGER.format(recipe.parallel.schedule)}" if eager else "")


def note_of(recipe: Recipe) -> str:
    """A note on what a plan of a rank of a pipeline does not count."""
    waits = "; what weight gradients wait with is not in the bytes" if Pipeline.of(recipe.parallel).defers else ""
    return NOTE + waits


def under_way(pipeline: Pipeline, microbatches: int) -> int:
    """Most micro-batches whose activations a rank of a pipeline keeps at a time.

    Example:
        >>> [under_way(Pipeline(4, name, 2), 16) for name in ("1f1b", "gpipe", "interleaved")]
        [4, 16, 6]
    """
    if pipeline.schedule == "1f1b":
        return min(pipeline.pp, microbatches)
    if pipeline.schedule == "gpipe":
        return microbatches
    if (
        pipeline.defers and pipeline.schedule != "interleaved_deferred"
    ):  # counted in torch's own orders, until the weight gradients of a pass are computed
        return min(pipeline.pp + (pipeline.schedule == "dualpipe_v"), microbatches)
    stages = (
        (pipeline.virtual - 1) * pipeline.pp + 2 * (pipeline.pp - 1) + 1
    )  # forward passes before the first backward
    return min(microbatches, -(-stages // pipeline.virtual))


def largest_stage(recipe: Recipe, planner: Planner, budget: Budget) -> Plan:
    """The plan of the pipeline rank that holds most memory, as the recipe stands.

    Args:
        recipe: with `parallel.pp` above 1, and the numbers of processes that there are.
        planner: of it, for one process.
        budget: of a rank.
    """
    pipeline = Pipeline.of(recipe.parallel)
    eager: dict[str, object] = {"train.compile": "off"} if pipeline.defers else {}
    shape = planner.with_recipe(staged := changed(recipe, eager)).shape(staged)
    ranges = pipeline.split(shape.num_layers, *_costs(shape, staged, planner))
    micro = recipe.train.micro_batch_size
    rows = micro * under_way(pipeline, GlobalConfig.of(recipe).num_micro)
    settings = {"parallel.pp": 1, "train.micro_batch_size": min(rows, recipe.train.global_batch_size)}
    of_stage = planner.with_recipe(changed(staged, settings))
    config = GlobalConfig.of(of_stage.recipe)
    # torch's runtime gathers a stage's layers as they are stored, and keeps them
    whole = replace(config.shards, reshard=False, reduce_each=False, staged=True)
    config = replace(config, shards=whole)
    different: dict[tuple[tuple[str, int], ...], tuple[int, ...]] = {}  # by how many layers of each kind
    for rank in range(pipeline.pp):
        layers = tuple(layer for stage in pipeline.stages_of(rank) for layer in ranges[stage])
        kinds = Counter(shape.class_of(layer).name for layer in layers)
        different.setdefault(tuple(sorted(kinds.items())), layers)
    plans = [
        of_stage.with_shape(shape.holding(layers)).priced(config, memory_plan_of(of_stage.recipe, len(layers)), budget)
        for layers in different.values()
    ]
    largest, split = max(plans, key=lambda plan: plan.peak_bytes), recipe.parallel.split
    largest = replace(largest, stages=pipeline.pp, whole=shape)
    if split or ranges == pipeline.split(shape.num_layers):  # a run's split by default needs no note
        return replace(largest, split=split)
    split = tuple(map(len, ranges))
    note = UNEQUAL.format(", ".join(map(str, split)))
    return replace(largest, split=split, notes=(*largest.notes, note))


def _costs(shape: ModelShape, recipe: Recipe, planner: Planner) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Costs of layers and ends of the whole model, for a pipeline's stages: parts of matrices say nothing of a layer
    that is not cut, nor of experts."""
    if recipe.parallel.tp > 1 or recipe.parallel.ep > 1:
        alone = changed(recipe, {"parallel.pp": 1, "parallel.tp": 1, "parallel.ep": 1})
        shape = planner.with_recipe(alone).shape(alone)
    return shape.layer_costs, shape.end_costs

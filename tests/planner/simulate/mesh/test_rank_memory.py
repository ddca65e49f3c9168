"""Bytes of the ranks of a mesh against a plan of one device of the same recipe, and what stages add up to."""

import itertools
import math
from math import prod

import pytest

from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tests.planner.test_cost import MLA, MOE
from tilewright.core.config.change_recipe import changed
from tilewright.core.memory_plan import KIND_OF
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.cost.rank_share import Gathered, Shards
from tilewright.planner.cost.step_phases import CHECKPOINT, EVALUATE
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.planner.simulate.mesh.cluster import Cluster
from tilewright.planner.simulate.mesh.mesh_model import MeshModel, ShapeKey
from tilewright.planner.simulate.mesh.mesh_search import MeshSearch
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.mesh.setting_step import MeshCosts, MeshRates
from tilewright.planner.simulate.pass_costs import Link

RATES, ONE = make_rates(), Pipeline(1)
MODELS = {"dense": {"num_kv_heads": 2}, "untied": {"tie_embeddings": False}, "moe": MOE, "mla": MLA}
MESHES = {
    "one rank": {},
    "shards": {"dp_shard": 4},
    "odd shards": {"dp_shard": 3},
    "copies": {"dp_replicate": 2, "dp_shard": 1},
    "copies of shards": {"dp_replicate": 2, "dp_shard": 2},
    "cut": {"tp": 2, "dp_shard": 1},
    "cut shards": {"tp": 2, "dp_shard": 2},
    "experts": {"dp_shard": 4, "ep": 2},
    "cut experts": {"dp_shard": 2, "tp": 2, "ep": 4},
}
FORMATS = {
    "plain": {},
    "bf16": {"precision.mode": "bf16_mixed", "optim.moments": "8bit"},
    "fp8": {"precision.mode": "fp8_tile", "train.activation_checkpoint": "full"},
    "stochastic": {"optim.master_weights": "stochastic", "train.activation_checkpoint": "selective"},
}


def recipe_of(model: str, mesh: str, formats: str):
    """With the batch of two micro-batches of two rows on each rank that reads other rows."""
    sizes = {"dp_shard": 1} | MESHES[mesh]
    data = sizes["dp_shard"] * sizes.get("dp_replicate", 1)
    train = {"global_batch_size": 4 * data, "micro_batch_size": 2}
    recipe = make_recipe(model={"num_heads": 4} | MODELS[model], train=train, parallel=sizes)
    return changed(recipe, FORMATS[formats])


def searched(recipe, machine, pipeline=ONE):
    """The step of a search for the recipe as it stands; of stages without the table of their schedule."""
    parallel, train, optim = recipe.parallel, recipe.train, recipe.optim
    sizes = MeshSizes.of(parallel)
    cluster = Cluster(1, sizes.world, Link(1e9), Link(1e9))
    rates = MeshRates(MeshModel(recipe, 512, machine, RATES), cluster)
    count = train.global_batch_size // sizes.data // train.micro_batch_size
    kind = KIND_OF[train.activation_checkpoint]
    setting = MeshSetting(
        sizes, pipeline, train.micro_batch_size, count, kind, optim.moments, optim.master_weights, parallel.reduce_each
    )
    space = Space.of(rates.model, sizes.world, sizes.world)
    return MeshSearch(rates, space, 64.0 * GIB, 1e12).priced(MeshCosts(rates, setting), 1.0, None)


CASES = [
    ("untied", "one rank", "stochastic", "cuda"), ("moe", "one rank", "fp8", "cpu"), ("dense", "shards", "fp8", "cuda"),
    ("moe", "shards", "stochastic", "cuda"), ("mla", "odd shards", "bf16", "cpu"), ("moe", "copies", "plain", "cuda"),
    ("dense", "copies of shards", "bf16", "cuda"), ("dense", "cut", "bf16", "cuda"), ("mla", "cut", "fp8", "cuda"),
    ("untied", "cut shards", "plain", "cpu"), ("moe", "experts", "fp8", "cuda"), ("moe", "experts", "plain", "cpu"),
    ("moe", "cut", "bf16", "cuda"), ("moe", "cut shards", "plain", "cuda"), ("moe", "cut experts", "fp8", "cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "mesh", "formats", "device"), CASES)
def test_without_stages_a_rank_is_a_plan_of_one_device(model, mesh, formats, device):
    recipe, machine = recipe_of(model, mesh, formats), make_machine(device=device)
    found = searched(recipe, machine).memory[0].phases
    plan = make_plan(recipe, 512, machine, RATES)
    for name, owners in plan.phases.items():
        if name in (EVALUATE, CHECKPOINT):
            same = [rank for phase, rank in found.items() if phase.startswith(name)]
            mine = max(same, key=lambda rank: math.fsum(rank.values()))
        else:
            mine = found[name]
        assert mine == pytest.approx(owners, rel=1e-12, abs=1.0), (name, dict(mine), dict(owners))


@pytest.mark.parametrize(
    ("model", "schedule"), [("dense", "1f1b"), ("moe", "interleaved"), ("mla", "zbv"), ("untied", "zbv")]
)
def test_stages_hold_the_model_once(model, schedule):
    """But for a tied matrix, which both ends have."""
    recipe = recipe_of(model, "one rank", "plain")
    recipe = changed(recipe, {"model.num_layers": 9, "parallel.pp": 3, "train.global_batch_size": 12})
    pipeline = Pipeline(3, schedule, 1 if schedule == "1f1b" else 2)
    step = searched(recipe, make_machine(), pipeline)
    held = math.fsum(rank.phases["update"]["parameters"] for rank in step.memory)
    alone = changed(recipe, {"parallel.pp": 1})
    whole = searched(alone, make_machine()).memory[0].phases["update"]["parameters"]
    ends_meet = schedule == "zbv"
    twice = 4 * 512 * 64 if recipe.model.tie_embeddings and not ends_meet else 0
    assert held == whole + twice, (held, whole, twice)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_whole_gradients_are_of_a_rank_s_own_experts(ep):
    """Between micro-batches: of the model but for the experts of other ranks, less the part that gradients are in."""
    recipe = changed(recipe_of("moe", "shards", "plain"), {"parallel.ep": ep, "train.activation_checkpoint": "full"})
    shape = ShapeFinder(512, make_machine()).find(recipe)
    whole = shape.weights
    experts = sum(n * prod(kind.shape) for kind, n in whole.tensors.kinds.items() if kind.spread > 1)
    gathered = Gathered(shape, Shards.of(recipe), num_micro=2)
    own = 4 * (whole.trained - experts * (1 - 1 / ep))
    assert gathered.accumulates
    assert gathered.gradients == pytest.approx(own - 4 * whole.part(4).trained, rel=0.01)


@pytest.mark.parametrize("rows", [1, 4])
def test_codes_are_made_of_a_rank_s_own_experts(rows):
    """And of as many tokens as before: with experts spread over ranks a pass takes no longer, and of many weights
    much less."""
    recipe = changed(recipe_of("moe", "shards", "fp8"), {"model.num_experts": 8, "model.num_experts_per_token": 2})
    model = MeshModel(recipe, 512, make_machine(device="cuda"), RATES)
    place = next(number for number, found in enumerate(model.whole.classes) if found.routes)
    spread = [model.passes(place, rows, "keep", ShapeKey("fp32", ep, shards=4)) for ep in (1, 2, 4, 8)]
    forward = [one.forward for one in spread]
    assert forward == sorted(forward, reverse=True), forward
    steps = [before - after for before, after in itertools.pairwise(forward)]
    assert steps[0] == pytest.approx(2 * steps[1], rel=0.01), "half of the experts' weights, then a quarter"


def test_shards_of_stages_are_gathered_as_they_are_stored_and_casts_are_kept():
    """A run gathers what layers read in 16 bits; of stages it gathers FP32, and layers cast it."""
    recipe = recipe_of("untied", "shards", "bf16")
    model = MeshModel(recipe, 512, make_machine(device="cuda"), RATES)
    alone, staged = (model.shape(model.key("fp32", MeshSizes(pp=pp, dp_shard=4))) for pp in (1, 2))
    layer, of_stage = alone.classes[0], staged.classes[0]
    matrices = sum(one.num_weights for one in layer.matmuls)
    kept = of_stage.kept(1) - layer.kept(1)
    gathered = of_stage.weights.tensors.gathered(4) - layer.weights.tensors.gathered(4)
    assert kept == pytest.approx(2 * matrices), "16-bit copies of the layer's matrices"
    assert gathered == pytest.approx(2 * matrices), "two bytes more of each weight"

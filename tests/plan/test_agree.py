"""The joint plan and the plain plan say the same of a run that both know, on a CPU, held against runs before."""

import pytest

from tests.plan.rates import GIB, make_machine, make_rates, make_recipe
from tests.plan.test_cost import MOE
from tilewright.plan.cost import make_plan
from tilewright.plan.joint import JointPlanner
from tilewright.plan.joint_plan import Budget
from tilewright.plan.options import Links, Setting
from tilewright.plan.plain import plain
from tilewright.training.slicing import placed

WIDE = {"dim": 512, "num_layers": 12, "num_heads": 8, "tie_embeddings": False}
MODELS = {
    "tiny": {"model": {"dim": 64, "num_layers": 3, "num_heads": 2}, "data": {"seq_len": 128}},
    "default": {"model": {"dim": 320, "num_layers": 6, "num_heads": 5}, "data": {"seq_len": 512}},
    "moe": {"model": MOE | {"dim": 256, "num_layers": 4, "num_heads": 4}, "data": {"seq_len": 256}},
    "untied": {
        "model": {"dim": 512, "num_layers": 12, "num_heads": 8, "tie_embeddings": False},
        "data": {"seq_len": 512},
    },
}
LOW = {"optim": {"moments": "8bit", "master": "stochastic", "clip": "lagged"}}
RUNS = {
    "none": {"train": {"activation_checkpoint": "none"}},
    "selective": {"train": {"activation_checkpoint": "selective"}},
    "attention": {"train": {"activation_checkpoint": "attention"}},
    "full": {"train": {"activation_checkpoint": "full", "micro_batch": 16}},
    "no_accumulation": {"train": {"micro_batch": 16}, "save": {"background": False}},
    "fp8": {"precision": {"mode": "fp8_tile"}},
    "fp32": {"precision": {"mode": "fp32"}},
    "low_bits": {"optim": {"moments": "8bit", "master": "stochastic"}},
    "slices": {"memory": {"executor": "layer_major"}, "train": {"micro_batch": 4}},
    "slices_disk": {"memory": {"executor": "layer_major", "states": "disk"}, "train": {"micro_batch": 4}} | LOW,
    "slices_inputs": {"memory": {"executor": "layer_major", "inputs": "disk"}, "train": {"micro_batch": 4}} | LOW,
    "slices_host": {"memory": {"executor": "layer_major", "states": "host"}, "train": {"micro_batch": 4}},
}


@pytest.mark.parametrize("compiler", ["g++", None], ids=["compiled", "eager"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("model", MODELS)
def test_peaks_agree(model, run, compiler):
    recipe = make_recipe(**(MODELS[model] | RUNS[run]))
    machine, rates = make_machine(64 * GIB, compiler=compiler), make_rates()
    want = make_plan(recipe, 8192, machine, rates)
    planner = JointPlanner(recipe, 8192, machine, rates)
    tiers = {recipe.memory.parameters, recipe.memory.states, recipe.memory.inputs}
    budget = Budget(64.0 * GIB, 0.0, Links(None, 1e9 if "disk" in tiers else None), 64.0 * GIB)
    got = plain(planner.priced(Setting.of(recipe), placed(recipe, planner.shape(recipe).num_layers), budget))
    assert got.phase_bytes(got.step_phase) == pytest.approx(want.phase_bytes(want.step_phase), rel=0.04)
    assert got.peak_bytes == pytest.approx(want.peak_bytes, rel=0.05)
    for owner in ("parameters", "optimizer", "gradients", "buffers"):
        mine, other = got.phases["update"].get(owner, 0), want.phases["update"].get(owner, 0)
        if recipe.memory.executor == "standard":
            assert mine == pytest.approx(other, rel=0.01, abs=2**20), owner

"""The joint plan and the plain plan say the same bytes and seconds of a run that both know."""

import pytest

from tests.plan.rates import GIB, make_machine, make_rates, make_recipe
from tests.plan.test_cost import MOE
from tilewright.core.config import Recipe
from tilewright.core.load import load_recipe
from tilewright.plan.cost import Plan, make_plan
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


SHIPPED = ("default", "cpu_50m", "tiny_moe", "slice_cpu", "slice_3b_cpu", "fp32", "hybrid_fp16", "tf32_then_bf16")
MODES: dict[str, dict[str, str]] = {
    "as it stands": {},
    "bf16": {"precision.mode": "bf16_mixed"},
    "fp8": {"precision.mode": "fp8_tile"},
    "full": {"train.activation_checkpoint": "full"},
    "fp8, full": {"precision.mode": "fp8_tile", "train.activation_checkpoint": "full"},
    "layer_major": {"memory.executor": "layer_major"},
    "fp8, layer_major": {"precision.mode": "fp8_tile", "memory.executor": "layer_major"},
}


def both(recipe: Recipe, vocab_size: int, machine) -> tuple[Plan, Plan]:
    """(the plain plan, the joint plan) of a recipe as it stands."""
    rates = make_rates()
    planner = JointPlanner(recipe, vocab_size, machine, rates)
    tiers = {recipe.memory.parameters, recipe.memory.states, recipe.memory.inputs}
    host = 50e9 if machine.device == "cuda" else None
    memory = float(machine.device_memory_bytes)
    budget = Budget(memory, 0.0, Links(host, 1e9 if "disk" in tiers else None), memory)
    joint = planner.priced(Setting.of(recipe), placed(recipe, planner.shape(recipe).num_layers), budget)
    return make_plan(recipe, vocab_size, machine, rates), plain(joint)


@pytest.mark.parametrize("compiler", ["g++", None], ids=["compiled", "eager"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHIPPED)
def test_seconds_agree(name, mode, compiler):
    settings = {**MODES[mode], "memory.states": "device"}  # what a disk adds only the joint plan knows
    if name.startswith("slice") and "full" in mode:
        pytest.skip("layer-major recipes recompute in any case")
    recipe = load_recipe(name, settings, environ={}).recipe
    want, got = both(recipe, recipe.data.vocab_size, make_machine(64 * GIB, compiler=compiler))
    assert got.step_s == pytest.approx(want.step_s, rel=0.02)
    for part in ("head", "loss", "optimizer", "weights"):
        assert got.seconds[part] == pytest.approx(want.seconds[part], rel=0.02), part


def test_seconds_agree_on_a_gpu():
    for mode in ("bf16_mixed", "fp8_tile"):
        settings = {"precision.mode": mode, "memory.states": "device"}
        recipe = load_recipe("slice_42b_h200", settings, environ={}).recipe
        want, got = both(recipe, recipe.data.vocab_size, make_machine(139 * GIB, "cuda"))
        assert got.step_s == pytest.approx(want.step_s, rel=0.02), mode


@pytest.mark.parametrize("compiler", ["g++", None], ids=["compiled", "eager"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("model", MODELS)
def test_peaks_agree(model, run, compiler):
    recipe = make_recipe(**(MODELS[model] | RUNS[run]))
    want, got = both(recipe, 8192, make_machine(64 * GIB, compiler=compiler))
    assert got.phase_bytes(got.step_phase) == pytest.approx(want.phase_bytes(want.step_phase), rel=0.04)
    assert got.peak_bytes == pytest.approx(want.peak_bytes, rel=0.05)
    for owner in ("parameters", "optimizer", "gradients", "buffers"):
        mine, other = got.phases["update"].get(owner, 0), want.phases["update"].get(owner, 0)
        if recipe.memory.executor == "standard":
            assert mine == pytest.approx(other, rel=0.01, abs=2**20), owner

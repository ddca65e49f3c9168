"""Kinds of adapters in a plan: what trains, and what dropout keeps, equal those of a real model."""

import json

import pytest

from tests.planner.rates import make_recipe
from tests.planner.test_cost import HF, MACHINE, make_batch, plan_of
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.components.model import build_adapted

MODEL = {"dim": 128, "num_layers": 3, "num_heads": 2}


def real(recipe):
    built = build_adapted(recipe, 512, Kernels(MACHINE), "cpu", fresh=True)
    convert(built, Policy.from_section(recipe.precision, "cpu"), kernels=Kernels(MACHINE))
    return built.train()


def measured(recipe):
    """Live bytes that a second forward pass leaves."""
    model, batch, tracker = real(recipe), make_batch(recipe, 512), MemoryTracker("cpu")
    for _ in range(2):
        with tracker.phase("forward"):
            out = model.loss(batch)
        row = tracker.snapshot(model, None)
        out.loss_sum.backward()
    return row["phase_owners"]["forward"]["activations"]


@pytest.mark.parametrize("mode", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("kind", ["decoder", pytest.param("hf", marks=pytest.mark.slow)])
def test_what_dropout_keeps_is_planned(mode, kind, tmp_path):
    """Beside the plan without it, which keeps inputs that a frozen weight does not need (up to an eighth here)."""
    model = dict(MODEL)
    if kind == "hf":
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text(json.dumps(HF))
        model = {"kind": "hf", "path": str(tmp_path)}
    found = {}
    for dropout in (0.0, 0.1):
        recipe = make_recipe(
            model=model,
            precision={"mode": mode},
            train={"micro_batch_size": 4},
            lora={"rank": 4, "base": "keep", "dropout": dropout},
        )
        found[dropout] = plan_of(recipe).phases["forward"]["activations"], measured(recipe)
    planned, real_bytes = (found[0.1][i] - found[0.0][i] for i in range(2))
    assert planned == pytest.approx(real_bytes, rel=0.25), f"{planned / real_bytes - 1:+.1%}"
    assert found[0.1][0] == pytest.approx(found[0.1][1], rel=0.15), f"{found[0.1][0] / found[0.1][1] - 1:+.1%}"


@pytest.mark.parametrize("whole", [(), ("embed_tokens", "lm_head"), ("norm", "*.down_proj")])
def test_modules_that_train_as_a_whole_are_planned(whole):
    recipe = make_recipe(model=MODEL, lora={"rank": 4, "base": "keep", "rslora": True, "modules_to_save": whole})
    trained = sum(p.numel() for p in real(recipe).parameters() if p.requires_grad)
    update = plan_of(recipe).phases["update"]
    assert (update["gradients"], update["optimizer"]) == (4 * trained, 8 * trained)

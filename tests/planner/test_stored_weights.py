"""Bytes of a plan's weights are those that a converted model stores: frozen ones and experts in one tensor as well."""

import copy
import json

import pytest
from torch import nn

from tests.cover import covering
from tests.planner.families import FAMILIES
from tests.planner.rates import make_machine, make_recipe
from tilewright.ops.kernels import Kernels
from tilewright.planner.model.skeleton import skeleton_of
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy

pytest.importorskip("transformers")
NARROW = {"precision": {"mode": "bf16_mixed"}, "optim": {"master_weights": "stochastic"}}
WIDE = {"precision": {"mode": "bf16_mixed"}}
ADAPTERS = {"lora": {"rank": 4, "base": "keep", "targets": ("*",)}}
CASES = {"all": NARROW, "all, FP32": WIDE, "adapters": NARROW | ADAPTERS, "adapters, FP32": WIDE | ADAPTERS}


def stored(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "case"),
    covering(
        [name for name, family in FAMILIES.items() if family.task == "causal_lm"],
        tuple(CASES),
        pairs=False,
        name="stored",
    ),
)
def test_planned_weights_are_as_the_run_stores_them(name, case, tmp_path):
    family = FAMILIES[name]
    (tmp_path / "config.json").write_text(json.dumps(family.config))
    recipe = make_recipe(model={"kind": "hf", "path": str(tmp_path), "task": family.task}, **CASES[case])
    master = recipe.optim.master_weights
    policy = Policy.from_section(recipe.precision, "cpu", parameters="" if master == "fp32" else "bf16")
    skeleton = skeleton_of(recipe, family.config["vocab_size"])
    before, layers, behind = skeleton.weights(policy)
    planned = before.stored + sum(each.stored for each in layers) + behind.stored
    model = convert(copy.deepcopy(skeleton.model), policy, kernels=Kernels(make_machine()))
    assert planned == stored(model), f"{planned / stored(model):.3f} of what is stored"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert before.trained + sum(each.trained for each in layers) + behind.trained == trained

"""`tilewright plan MODEL` offers the row that is best: no recipe that the table could have chosen beats it."""

import itertools
import json

import pytest

from tests.cli.tuned import arguments, make_model, make_talks
from tests.contracts.observe import fixed_ceilings
from tilewright.cli.commands.chat_models.finetune_ways import _Planning, ways
from tilewright.cli.commands.chat_models.tuned_recipe import tuned_recipe
from tilewright.planner.advice.recipe_changes import WORTH
from tilewright.planner.decide import typed_too
from tilewright.training.planning.plan_request import PlanRequest

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
CHOICES = {
    "optim.moments": (None, "bf16", "8bit"),
    "train.micro_batch_size": (None, 4, 16),
    "memory.executor": (None, "layer_major"),
    "optim.clip": (None, "delayed"),
    "memory.rollback": (None, "checkpoint"),
}


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr("tilewright.planner.machine.ceilings.measure", fixed_ceilings)


def others(way, planning, choices):
    """Plans of the same way with settings typed, all that are recipes and fit."""
    for values in itertools.product(*choices.values()):
        settings = {name: value for name, value in zip(choices, values, strict=True) if value is not None}
        loaded = typed_too(way.loaded, settings) if settings else None
        plan = None if loaded is None else planning.way(loaded, way.how).plan
        if plan is not None and plan.state == "fits":
            yield settings, plan


def check(found, planning, plain, choices):
    """What changes what is learned is the table's to choose only where the recipe does not fit as it stands."""
    for way in found:
        if way.state != "fits":
            continue
        open_ = dict(choices)
        base = planning.way(plain[way.how], way.how)
        if not base.layers:
            open_ = {name: values for name, values in choices.items() if not name.startswith(("optim.", "memory."))}
        for settings, plan in others(base, planning, open_):
            assert way.plan.tokens_per_s * WORTH**2 >= plan.tokens_per_s, (way.how, way.chosen, settings)
        assert base.plan is None or way.plan.tokens_per_s >= base.plan.tokens_per_s
        assert bool(way.chosen) == (way.plain is not None)


@pytest.mark.parametrize("share", [*(pytest.param(share, marks=pytest.mark.slow) for share in (0.4, 0.7)), 3.0])
def test_no_recipe_that_the_table_could_have_chosen_beats_its_row(share, tmp_path):
    model = make_model(tmp_path / "model", "llama")
    raw = json.loads((model / "config.json").read_text())
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    (model / "config.json").write_text(json.dumps(raw | sizes))
    (model / "model.safetensors").unlink()  # a plan needs none
    typed = arguments(tmp_path, train__global_batch_size=16, data__seq_len=1024)
    at = typed.index("--train.micro_batch_size")
    typed = ["--data.source", str(make_talks(tmp_path / "talks.jsonl")), *typed[:at], *typed[at + 2 :]]
    request = PlanRequest(on="4090", host_memory="64GiB")
    planning = _Planning(request)
    recipes = {how: tuned_recipe(str(model), [], how, typed, weights=False)[0] for how in ("lora", "full")}
    stands = planning.way(recipes["full"], "full").plan
    process = stands.phases["load"]["process"] - 0.02 * stands.budget.device
    work = stands.peak_bytes - stands.phases["load"]["process"]
    size = int((process + share * work) / 0.9)
    request = PlanRequest(on="4090", host_memory="64GiB", device_memory=str(size))
    typed = [*typed, f"--plan.device_memory={size}"]
    recipes = {how: tuned_recipe(str(model), [], how, typed, weights=False)[0] for how in ("lora", "lora_fp8", "full")}
    found = list(ways(str(model), "model", typed[:-1], request))
    assert any(way.state == "fits" for way in found)
    check(found, _Planning(request), recipes, CHOICES)


@pytest.mark.slow
def test_all_of_eight_billion_parameters_on_a_4090(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    request = PlanRequest(on="4090")
    found = list(ways(str(tmp_path), "model", [], request))
    wide = next(way for way in found if way.how == "full")
    assert wide.chosen["optim.moments"] == "8bit"
    assert wide.plan.tokens_per_s > 1.5 * wide.plain.tokens_per_s
    assert wide.plan.host_bytes < 0.6 * wide.plain.host_bytes
    loaded = {how: tuned_recipe(str(tmp_path), [], how, [], weights=False)[0] for how in ("lora", "lora_fp8", "full")}
    check(found, _Planning(request), loaded, CHOICES)

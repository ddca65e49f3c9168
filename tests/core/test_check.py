"""Settings that contradict each other: each check fires on its case, and says what would be right."""

import pytest

from tilewright.core.config import schema
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.unused import _VOID, without_effect
from tilewright.core.errors import ConfigError

CASES = [
    ({"model.kind": "hf"}, 'model.kind = "hf" needs the folder of the model'),
    ({"model.weights": "load"}, 'model.weights = "load" needs the folder that holds the weights'),
    ({"model.task": "masked_lm"}, 'the decoder does not learn "masked_lm"'),
    ({"model.num_heads": "3"}, "the width does not divide into the heads"),
    ({"model.dim": "20", "model.num_heads": "4"}, "rotary positions need heads of even width"),
    ({"model.num_heads": "8", "model.num_kv_heads": "3"}, "the query heads do not share the key/value heads evenly"),
    ({"model.attention": "mla", "model.qk_rope_head_dim": "7"}, "rotary positions need an even width"),
    ({"model.num_experts": "4", "model.num_dense_layers": "7"}, "more dense layers than layers"),
    ({"model.num_experts": "4", "model.num_expert_groups": "3"}, "the experts do not divide into the groups"),
    (
        {"model.num_experts": "4", "model.num_expert_groups": "2", "model.num_limited_groups": "3"},
        "a token cannot route to more groups than there are",
    ),
    (
        {"model.num_experts": "4", "model.num_experts_per_token": "3", "model.num_expert_groups": "2"},
        "a token cannot use more experts than it can reach",
    ),
    (
        {"model.kind": "hf", "model.path": "x", "model.task": "image_classification"},
        "the installed corpus holds no images",
    ),
    ({"save.export_hf": "true", "model.num_experts": "4"}, "no Hugging Face layout holds this shape"),
    (
        {"save.export_hf": "true", "model.num_heads": "3", "model.head_dim": "4"},
        "no Hugging Face layout holds this shape",
    ),
    (
        {
            "save.export_hf": "true",
            "model.attention": "mla",
            "model.num_experts": "4",
            "model.num_shared_experts": "0",
        },
        "no Hugging Face layout holds this shape",
    ),
    (
        {
            "save.export_hf": "true",
            "model.attention": "mla",
            "model.num_experts": "4",
            "model.num_expert_groups": "4",
            "model.num_limited_groups": "2",
        },
        "no Hugging Face layout holds this shape",
    ),
    ({"data.weights": "{ a = -1 }"}, "mixture weights must be 0 or more, and not all 0"),
    ({"data.weights": "{ a = 0 }"}, "mixture weights must be 0 or more, and not all 0"),
    ({"data.weights": "{ a = 1 }", "data.domains": '["b"]'}, "weights for domains that data.domains leaves out"),
    ({"precision.start_mode": "bf16_mixed"}, "a switch from a mode to itself"),
    (
        {"precision.start_mode": "pure_fp16"},
        "pure_fp16 cannot be one side of a switch, because its weights are stored in FP16",
    ),
    ({"precision.loss_scale_max": "0.5"}, "the loss scale has no room between its bounds"),
    ({"precision.loss_scale": "0.25"}, "the first loss scale is outside its bounds"),
    ({"optim.betas": "[0.9, 1.0]"}, "AdamW's betas must be at least 0 and below 1"),
    (
        {"optim.master": "stochastic", "precision.mode": "pure_fp16"},
        "stochastic rounding keeps the weights in BF16, pure_fp16 in FP16",
    ),
    ({"optim.master": "split24"}, "weights in 24 bits go with moments in 8 bits"),
    ({"train.micro_batch": "17"}, "one forward pass holds more rows than the whole step"),
    ({"train.checkpoint_inputs": "fp8"}, "only layers that are recomputed whole keep nothing but their inputs"),
    ({"run.name": "a/b"}, "the run's name must be a single folder name"),
]


@pytest.mark.parametrize(("settings", "what"), CASES)
def test_each_conflict(settings, what):
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, settings, {})
    (problem,) = caught.value.problems
    assert problem.what == what
    assert problem.got
    assert problem.need
    assert problem.try_
    assert any(f"--{name} on the command line" in problem.where for name in settings)


def test_two_experts_per_group_can_be_exported():
    shape = {"model.num_experts": "4", "model.num_expert_groups": "2", "model.num_limited_groups": "2"}
    load_recipe(None, {"save.export_hf": "true", "model.attention": "mla"} | shape, {})


def test_the_default_recipe_has_none():
    assert conflicts(Recipe()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"model.dim": "20", "model.num_heads": "3", "model.head_dim": "8"},
        {"model.num_heads": "3", "model.attention": "mla"},
        {"model.num_heads": "3", "model.path": "folder"},
        {"model.num_experts_per_token": "9"},
    ],
)
def test_what_another_setting_makes_void_is_no_conflict(settings):
    load_recipe(None, settings, {})


def test_voids_name_real_fields():
    known = {field.path for field in schema.fields()}
    assert {f"{section}.{name}" for _, _, section, names in _VOID for name in names} <= known


@pytest.mark.parametrize(
    ("settings", "path", "why"),
    [
        ({"model.path": "x"}, "model.dim", "model.path gives the shape"),
        ({"model.attention": "mla"}, "model.head_dim", 'model.attention = "mla"'),
        ({}, "model.balance_rate", "model.num_experts = 0"),
        ({"precision.enabled": "false"}, "precision.mode", "precision.enabled = false"),
        ({"optim.schedule": "constant"}, "optim.min_lr_ratio", 'optim.schedule = "constant"'),
    ],
)
def test_voids(settings, path, why):
    assert without_effect(load_recipe(None, settings, {}).recipe)[path] == why

"""Settings that contradict each other: each check fires on its case, and says what would be right."""

import pytest

from tilewright.core.config import setting_names
from tilewright.core.config.conflicts import conflicts
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.unused_settings import _VOID, without_effect
from tilewright.core.errors import ConfigError

CASES = [
    ({"model.kind": "hf"}, 'model.kind = "hf" needs the folder of the model'),
    ({"model.weights": "load"}, 'model.weights = "load" needs the folder that holds the weights'),
    ({"model.task": "masked_lm"}, 'Task "masked_lm" is not supported by the decoder'),
    ({"model.num_heads": "3"}, "Model width is not a multiple of the number of heads"),
    ({"model.dim": "20", "model.num_heads": "4"}, "Rotary positions need heads of even width"),
    (
        {"model.num_heads": "8", "model.num_kv_heads": "3"},
        "Number of query heads is not a multiple of the number of key/value heads",
    ),
    ({"model.attention": "mla", "model.qk_rope_head_dim": "7"}, "Rotary positions need an even width"),
    ({"model.num_experts": "4", "model.num_dense_layers": "7"}, "More dense layers than layers"),
    (
        {"model.num_experts": "4", "model.num_expert_groups": "3"},
        "Number of experts is not a multiple of the number of expert groups",
    ),
    (
        {"model.num_experts": "4", "model.num_expert_groups": "2", "model.num_limited_groups": "3"},
        "More limited groups than expert groups",
    ),
    (
        {"model.num_experts": "4", "model.num_experts_per_token": "3", "model.num_expert_groups": "2"},
        "More experts per token than a token can reach",
    ),
    (
        {"model.kind": "hf", "model.path": "x", "model.task": "image_classification"},
        "Installed corpus holds no images",
    ),
    ({"checkpoint.export_hf": "true", "model.num_experts": "4"}, "No Hugging Face layout for this shape"),
    (
        {
            "checkpoint.export_hf": "true",
            "model.attention": "mla",
            "model.num_experts": "4",
            "model.num_shared_experts": "0",
        },
        "No Hugging Face layout for this shape",
    ),
    (
        {
            "checkpoint.export_hf": "true",
            "model.attention": "mla",
            "model.num_experts": "4",
            "model.num_expert_groups": "4",
            "model.num_limited_groups": "2",
        },
        "No Hugging Face layout for this shape",
    ),
    ({"data.weights": "{ a = -1 }"}, "Mixture weights must be 0 or more, and not all 0"),
    ({"data.weights": "{ a = 0 }"}, "Mixture weights must be 0 or more, and not all 0"),
    ({"data.weights": "{ a = 1 }", "data.domains": '["b"]'}, "Weights for domains that data.domains leaves out"),
    (
        {"data.source": "https://me:secret@host/data"},
        "Address with a password or a query in it",
    ),
    ({"data.sources": '{ a = "http://host/data?key=secret" }'}, "Address with a password or a query in it"),
    ({"precision.start_mode": "bf16_mixed"}, "Start mode equals the mode"),
    (
        {"precision.start_mode": "pure_fp16"},
        "Mode pure_fp16 cannot be combined with a start mode",
    ),
    ({"precision.loss_scale_max": "0.5"}, "Loss scale bounds leave no room"),
    ({"precision.loss_scale": "0.25"}, "Initial loss scale is outside its bounds"),
    ({"optim.betas": "[0.9, 1.0]"}, "AdamW betas outside [0, 1)"),
    (
        {"optim.master_weights": "stochastic", "precision.mode": "pure_fp16"},
        "Stochastic rounding to BF16 contradicts pure_fp16",
    ),
    ({"optim.master_weights": "split24"}, "24-bit weights need 8-bit moments"),
    ({"train.micro_batch_size": "17"}, "Micro-batch is larger than the global batch"),
    ({"train.checkpoint_inputs": "fp8"}, "FP8 layer inputs need full activation checkpointing"),
    ({"train.steps": "0"}, "Run without a length"),
    ({"run.name": "a/b"}, "Run name is not a single folder name"),
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


def test_a_login_in_an_address_is_not_repeated():
    """Where it belongs is said. User names alone, and what other schemes have before an @, are none."""
    for address in ("https://me:secret@host:8443/data", "http://host/data?token=secret"):
        with pytest.raises(ConfigError) as caught:
            load_recipe(None, {"data.source": address}, {})
        assert "secret" not in str(caught.value)
        assert "FSSPEC_HTTP" in caught.value.problems[0].try_
    for address in ("sftp://me@host/data", "github://org:name@main/data", "s3://bucket/a?b", "http://host/data"):
        load_recipe(None, {"data.source": address}, {})


def test_two_experts_per_group_can_be_exported():
    shape = {"model.num_experts": "4", "model.num_expert_groups": "2", "model.num_limited_groups": "2"}
    load_recipe(None, {"checkpoint.export_hf": "true", "model.attention": "mla"} | shape, {})


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
    known = {field.path for field in setting_names.fields()}
    assert {f"{section}.{name}" for _, _, section, names in _VOID for name in names} <= known


@pytest.mark.parametrize(
    ("settings", "path", "why"),
    [
        ({"model.path": "x"}, "model.dim", "model.path gives the shape"),
        ({"model.attention": "mla"}, "model.head_dim", 'model.attention = "mla"'),
        ({}, "model.balance_rate", "model.num_experts = 0"),
        ({"precision.enabled": "false"}, "precision.mode", "precision.enabled = false"),
        ({"optim.schedule": "constant"}, "optim.min_lr_ratio", 'optim.schedule = "constant"'),
        ({"train.steps": "7", "train.minutes": "2"}, "train.minutes", "train.steps is given"),
        ({"precision.loss_scale": "off"}, "precision.loss_scale_min", 'precision.loss_scale = "off"'),
        ({}, "precision.loss_scale_window", "nothing here is in FP16"),
    ],
)
def test_voids(settings, path, why):
    assert without_effect(load_recipe(None, settings, {}).recipe)[path] == why

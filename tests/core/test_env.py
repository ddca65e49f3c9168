"""Environment variables: the DeepSeek names, the generic ones, and what is wrong with a value."""

import pytest

from tilewright.core import env
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("DEEPSEEK_AMP_ENABLED", "0", "enabled", False),
        ("DEEPSEEK_AMP_ENABLED", "True", "enabled", True),
        ("DEEPSEEK_PRECISION_MODE", "pure_fp16", "mode", "pure_fp16"),
        ("DEEPSEEK_LOSS_SCALE_WINDOW", "500", "loss_scale_window", 500),
        ("DEEPSEEK_FP32_OPS", "layer_norm,softmax", "fp32_ops", ("layer_norm", "softmax")),
        ("TILEWRIGHT_PRECISION_LOSS_SCALE_WINDOW", "7", "loss_scale_window", 7),
    ],
)
def test_each_variable_sets_its_field(name, text, path, value):
    loaded = load_recipe(None, environ={name: text})
    assert getattr(loaded.recipe.precision, path) == value
    assert loaded.sources[f"precision.{path}"] == f"env {name}"


@pytest.mark.parametrize(
    ("environ", "what", "need"),
    [
        ({"DEEPSEEK_AMP_ENABLED": "maybe"}, "DEEPSEEK_AMP_ENABLED is neither on nor off", "1 or 0"),
        ({"DEEPSEEK_PRECISION_MODE": "fp7"}, "precision.mode is not right", "one of"),
        ({"DEEPSEEK_LOSS_SCALE_WINDOW": "0"}, "precision.loss_scale_window is not right", "an integer, at least 1"),
        ({"DEEPSEEK_PRECISION": "fp32"}, "Unknown environment variable", "DEEPSEEK_PRECISION_MODE"),
        ({"TILEWRIGHT_TRAIN_STESP": "3"}, "Unknown setting train.stesp", ""),
        (
            {"DEEPSEEK_PRECISION_MODE": "fp32", "TILEWRIGHT_PRECISION_MODE": "fp32"},
            "precision.mode is set twice in the environment",
            "one of them",
        ),
    ],
)
def test_bad_values(environ, what, need):
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, environ=environ)
    (problem,) = caught.value.problems
    assert problem.what == what
    assert need in problem.need
    assert problem.where


def test_empty_means_not_set():
    assert env.settings({"DEEPSEEK_PRECISION_MODE": " ", "TILEWRIGHT_X": ""}) == ([], [])


def test_ranks_as_torchrun_sets_them():
    assert env.ranks({}) == env.Ranks(0, 0, 1)
    assert env.ranks({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}) == env.Ranks(5, 1, 8)

    with pytest.raises(ConfigError, match="WORLD_SIZE is not a number"):
        env.ranks({"WORLD_SIZE": "-1"})


def test_colour_and_compiler():
    assert env.no_color({"NO_COLOR": "1"})
    assert not env.no_color({})
    assert env.compiler({"CXX": " clang++ "}) == "clang++"

"""Wire formats of gradients: what cannot be with them is refused, with a change that is accepted when it is made."""

import pytest

from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError

LAYER_MAJOR = {"memory.executor": "layer_major", "optim.clip": "two_pass"}


def load(**settings):
    return load_recipe(None, settings, environ={}).recipe.parallel


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp8"])
def test_each_format_is_accepted(wire):
    assert load(**{"parallel.grad_sync": wire}).grad_sync == wire
    if wire != "fp32":
        assert load(**{"parallel.grad_sync": wire, "parallel.grad_feedback": "true"}).grad_feedback


@pytest.mark.parametrize(
    ("settings", "field", "fixes"),
    [
        (
            {"parallel.grad_feedback": "true"},
            "grad_feedback",
            [{"parallel.grad_sync": "fp8"}, {"parallel.grad_feedback": "false"}],
        ),
        (
            {"parallel.grad_sync": "fp8", "parallel.tp": "2"},
            "parallel.tp",
            [{"parallel.grad_sync": "fp32"}, {"parallel.tp": "1"}],
        ),
        (
            {"parallel.grad_sync": "fp8", **LAYER_MAJOR},
            "grad_sync",
            [{"parallel.grad_sync": "fp32"}, {"memory.executor": "standard"}],
        ),
    ],
)
def test_what_would_do_nothing_is_refused(settings, field, fixes):
    with pytest.raises(ConfigError) as error:
        load(**settings)
    assert field in str(error.value)
    for fix in fixes:
        (name, value), *_ = fix.items()
        assert f"--{name} {value}" in str(error.value)
        load(**(settings | fix))


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="bf16"):
        load(**{"parallel.grad_sync": "fp4"})

"""Wire formats of gradients: what cannot be with them is refused, with a change that is accepted when it is made."""

import pytest

from tilewright.core.config.load import load_recipe
from tilewright.core.config.unused_settings import without_effect
from tilewright.core.errors import ConfigError

AS_READ = {"parallel.param_gather": "as_read"}
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
            {"parallel.grad_sync_error": "0.1"},
            "grad_sync_error",
            [{"parallel.grad_sync": "fp8"}, {"parallel.grad_sync_error": "0"}],
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
        *(
            ({"parallel.param_gather": "fp8", "precision.mode": "fp8_tile", **more}, field, [fix, AS_READ])
            for more, field, fix in (
                ({"parallel.tp": "2"}, "parallel.tp", {"parallel.tp": "1"}),
                (LAYER_MAJOR, "memory.executor", {"memory.executor": "standard"}),
                (
                    {"precision.controller.enabled": "true"},
                    "precision.controller",
                    {"precision.controller.enabled": "false"},
                ),
            )
        ),
    ],
)
@pytest.mark.support("codes", "tensor", refused=True)
def test_what_would_do_nothing_is_refused(settings, field, fixes):
    with pytest.raises(ConfigError) as error:
        load(**settings)
    assert field in str(error.value)
    for fix in fixes:
        (name, value), *_ = fix.items()
        assert f"--{name} {value}" in str(error.value)
        load(**(settings | fix))


@pytest.mark.parametrize(
    ("settings", "void"),
    [
        ({"precision.mode": "fp8_tile"}, False),
        ({"precision.mode": "fp8_tile", "precision.fp8_scale": "fp32"}, True),
        ({"precision.mode": "bf16_mixed"}, True),
    ],
)
def test_weights_as_codes_where_nothing_reads_codes_have_no_effect(settings, void):
    recipe = load_recipe(None, settings | {"parallel.param_gather": "fp8"}, environ={}).recipe
    assert ("parallel.param_gather" in without_effect(recipe)) == void


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="bf16"):
        load(**{"parallel.grad_sync": "fp4"})

"""The loss scale: decisions equal to torch's GradScaler, bounds, counts, resuming, gradients found and undone."""

from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.draws import examples
from tilewright.core.config.recipe import Recipe
from tilewright.core.config.sections.precision import Mode, PrecisionRule, PrecisionSection
from tilewright.core.config.unused_settings import without_effect
from tilewright.core.errors import NumericsError
from tilewright.optim.gradients import found_inf
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler, initial_scale
from tilewright.precision.policy.policy import Policy


def torch_decisions(overflows: list[bool], init: float, window: int) -> list[tuple[float, bool]]:
    """(scale after, stepped) of torch.amp.GradScaler on a stream of overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=window)
    decisions = []
    for overflow in overflows:
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(torch.zeros(()))  # makes its lazy state
        weight.grad = torch.tensor([1.0, float("inf") if overflow else 1.0])
        scaler.step(optimizer)
        scaler.update()
        decisions.append((scaler.get_scale(), bool(weight.detach()[0] != 0)))
    return decisions


@examples(60)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5), st.integers(4, 16))
@pytest.mark.support("clip", "one")
def test_decisions_equal_torchs_grad_scaler(overflows, window, exponent):
    scaler = DynamicScaler(2.0**exponent, window=window, min=2.0**-80, max=2.0**80)
    decisions = []
    for overflow in overflows:
        weight = nn.Parameter(torch.zeros(2))
        scaler.scale(torch.zeros(()))
        weight.grad = torch.tensor([1.0, float("inf") if overflow else 1.0])
        stepped = scaler.step(torch.optim.SGD([weight], lr=1.0))
        assert stepped == bool(weight.detach()[0] != 0)
        scaler.update()
        decisions.append((scaler.scale_value, stepped))
    assert decisions == torch_decisions(overflows, 2.0**exponent, window)
    assert (scaler.skipped, scaler.steps) == (sum(overflows), len(overflows))


def test_scale_starts_from_the_parameter_count():
    assert initial_scale(100_000_000) == 2.0**13  # the article's "order of 1e4"
    assert [initial_scale(n) for n in (0, 1, 4, 65_000_000_000)] == [1.0, 1.0, 2.0, 2.0**18]
    assert DynamicScaler(num_params=100_000_000).scale_value == 8192.0
    assert DynamicScaler().scale_value == torch.amp.GradScaler("cpu").get_scale()


def test_scale_stays_in_its_bounds():
    scaler = DynamicScaler(8.0, window=1, min=4.0, max=16.0)
    assert [scaler.update(False) for _ in range(3)] == [16.0, 16.0, 16.0]
    assert [scaler.update(True) for _ in range(2)] == [8.0, 4.0]
    with pytest.raises(NumericsError) as caught:
        scaler.update(True)
    assert "3 of 6 steps" in caught.value.problems[0].got
    assert caught.value.exit_code == 4
    assert scaler.scale_value == 4.0
    assert DynamicScaler(num_params=10**12, max=1024.0).scale_value == 1024.0


@pytest.mark.parametrize("bad", [{"init_scale": 0.5}, {"growth": 1.0}, {"backoff": 1.0}, {"window": 0}, {"min": 0.0}])
def test_settings_that_make_no_sense(bad):
    with pytest.raises(ValueError, match="need 0 < min"):
        DynamicScaler(**bad)


def test_resuming_equals_never_having_stopped():
    stream = [False, False, True, False, False, False, True, False, False, False, False]
    straight, first, second = (DynamicScaler(1024.0, window=3) for _ in range(3))
    want = [straight.update(overflow) for overflow in stream]
    got = [first.update(overflow) for overflow in stream[:5]]
    second.load_state_dict(first.state_dict())
    got += [second.update(overflow) for overflow in stream[5:]]
    assert got == want
    assert second.state_dict() == straight.state_dict()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_found_inf_sees_one_bad_element(value, dtype):
    params = [nn.Parameter(torch.zeros(7, 5, dtype=dtype)) for _ in range(3)] + [nn.Parameter(torch.zeros(0))]
    for parameter in params:
        parameter.grad = torch.full_like(parameter, 6e4)
    params.append(nn.Parameter(torch.zeros(3)))  # no gradient
    assert not found_inf(params)
    params[1].grad[6, 4] = value
    assert found_inf(params)
    assert found_inf([]).item() is False


def test_gradients_come_back_true_from_a_scaled_loss():
    torch.manual_seed(0)
    layer, plain = nn.Linear(8, 4), nn.Linear(8, 4)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, 8)
    scaler = DynamicScaler(2.0**10)
    scaler.scale(layer(x).square().sum()).backward()
    plain(x).square().sum().backward()
    assert not scaler.unscale_(torch.optim.SGD(layer.parameters(), lr=1.0))
    for got, want in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_the_loss_is_scaled_in_fp32():
    loss = DynamicScaler(2.0**15).scale(torch.tensor(7.0, dtype=torch.float16))
    assert loss.dtype == torch.float32
    assert loss.item() == 7 * 2.0**15
    assert DynamicScaler().scale(torch.tensor(1 + 2.0**-40, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("setting", "fp16", "want"),
    [("off", True, None), ("auto", False, None), ("auto", True, 128.0), (512.0, False, 512.0)],
)
def test_from_section(setting, fp16, want):
    section = PrecisionSection(loss_scale=setting, loss_scale_window=7, loss_scale_min=2.0, loss_scale_max=4096.0)
    scaler = DynamicScaler.from_section(section, fp16=fp16, num_params=16384)
    assert (scaler and scaler.scale_value) == want
    if scaler is not None:
        assert (scaler.window, scaler.min, scaler.max) == (7, 2.0, 4096.0)


SETTINGS = {f"precision.loss_scale_{name}" for name in ("window", "min", "max")}


@pytest.mark.parametrize("loss_scale", ["auto", "off", 1024.0])
@pytest.mark.parametrize("enabled", [True, False])
def test_settings_of_the_scale_are_void_where_there_is_no_scale(enabled, loss_scale):
    """Each mode, mode to start with, and rule of FP16, as a GPU computes them."""
    rules = [(), (PrecisionRule(match="*", compute="fp16"),)]
    for mode, start, rule in product(get_args(Mode), [None, "hybrid", "tf32"], rules):
        section = PrecisionSection(enabled=enabled, mode=mode, start_mode=start, rules=rule, loss_scale=loss_scale)
        policy = Policy.from_section(section, "cuda")
        fp16 = bool(rule) or any(policy.in_mode(each).matmul == "fp16" for each in (mode, start or mode))
        scaler = DynamicScaler.from_section(section, fp16=enabled and fp16, num_params=1000)
        void = without_effect(Recipe(precision=section)).keys() & SETTINGS
        assert void == (SETTINGS if scaler is None else set()), section

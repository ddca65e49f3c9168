"""Seconds by the roofline against the arithmetic of their definitions."""

import pytest

from tests.planner.rates import make_rates
from tilewright.planner.model.roofline import head_s, loss_s

WIDTH = {"fp32": 4, "bf16": 2}


@pytest.mark.parametrize("fmt", WIDTH)
def test_a_compiled_loss_is_two_exponentials_and_four_passes(fmt):
    rates, logits = make_rates(), 1e9
    seconds = 2 * logits / rates.exp + 4 * logits * WIDTH[fmt] / rates.bandwidth
    assert loss_s(logits, compiled=True, fmt=fmt, rates=rates) == pytest.approx(seconds)


@pytest.mark.parametrize("fmt", WIDTH)
def test_an_eager_loss_takes_what_was_measured(fmt):
    rates = make_rates()
    assert loss_s(3e6, compiled=False, fmt=fmt, rates=rates) == pytest.approx(3e6 / rates.loss[fmt])


def test_a_head_is_three_products():
    rates, products = make_rates(), 3 * 2 * 128 * 64 * 512
    assert head_s(128, 64, 512, "fp32", rates) == pytest.approx(products / rates.matmul_rate("fp32", (64 * 512) ** 0.5))

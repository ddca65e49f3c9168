"""Sizes as text and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.units import (
    format_bytes,
    format_count,
    format_loss,
    format_perplexity,
    format_seconds,
    parse_bytes,
    perplexity,
)


@given(st.integers(0, 2**60))
def test_plain_integers_stay(count):
    assert parse_bytes(count) == parse_bytes(str(count)) == count


@pytest.mark.parametrize("bad", ["", "24MX", "-3", "1e3", "GiB", 1.5, None, [1], -1])
def test_what_is_no_size_is_a_value_error(bad):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(bad)


@given(st.integers(0, 2**60))
def test_format_parses_back_within_its_figures(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006, abs=1)


@given(st.floats())
def test_no_loss_overflows_its_perplexity(loss):
    value = perplexity(loss)
    assert value >= 0 or (math.isnan(loss) and math.isnan(value))
    assert value == math.inf if loss > 709.79 else math.isnan(loss) or value == math.exp(loss)
    assert len(format_perplexity(loss)) < 16
    assert len(format_loss(loss)) < 16


@given(st.floats() | st.integers(-(10**300), 10**300))
def test_every_number_has_a_text(value):
    for form in (format_bytes, format_count, format_seconds):
        assert form(value)

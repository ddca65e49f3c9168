"""Sizes as text and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.units import format_bytes, parse_bytes


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

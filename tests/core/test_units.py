"""Sizes as text and back."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.units import (
    format_bytes,
    format_count,
    format_loss,
    format_perplexity,
    format_seconds,
    format_share,
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


@given(st.floats(0, 1))
def test_what_is_not_nothing_is_not_shown_as_nothing(value):
    text = format_share(value)
    assert (text == "0 %") == (value == 0)
    assert (text == "100 %") == (value == 1)
    assert text == "< 0.1 %" or not 0 < value < 0.001
    shown = re.fullmatch(r"[<>]? ?(\d+(?:\.\d)?) %", text)
    assert abs(float(shown[1]) - 100 * value) <= 0.1
    assert not re.match(r"0(\.0+)? ", format_seconds(value)) or value == 0


@given(st.floats(1e-6, 1e6))
def test_a_duration_reads_back(seconds):
    text = format_seconds(seconds)
    parts = re.findall(r"([\d.]+) ?(ms|[hms])", text)
    factors = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    read = sum(float(number) * factors[unit] for number, unit in parts)
    smallest = factors[parts[-1][1]]
    assert abs(read - seconds) <= max(0.06 * seconds if seconds < 1e-3 else 0.01 * seconds, smallest), text
    assert "e" not in text


def test_the_end_of_a_run_has_no_thousandths():
    assert format_seconds(0) == "0 s"
    assert format_seconds(0.99996) == "1.0 s"
    assert format_seconds(59.97) == "1m00s"

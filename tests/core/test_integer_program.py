"""Whole-number programs against enumeration, and what is said where there is no time."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core import integer_program
from tilewright.core.errors import FitError
from tilewright.core.integer_program import Column, LinearRow, minimise

SMALL = st.integers(-5, 5)


@st.composite
def programs(draw):
    columns = [
        Column(draw(SMALL), lower, lower + draw(st.integers(0, 3)), whole=True)
        for lower in draw(st.lists(st.integers(-2, 2), max_size=3))
    ]
    rows = []
    for _ in range(draw(st.integers(0, 3))):
        entries = dict(enumerate(draw(st.lists(SMALL, min_size=len(columns), max_size=len(columns)))))
        lower = draw(st.one_of(st.just(-math.inf), st.integers(-10, 10)))
        rows.append(LinearRow(entries, lower, draw(st.one_of(st.just(math.inf), st.integers(-10, 10)))))
    return columns, rows


@examples(100)
@given(programs())
def test_the_cheapest_of_all_that_hold(program):
    columns, rows = program
    possible = []
    for values in itertools.product(*(range(int(c.lower), int(c.upper) + 1) for c in columns)):
        sums = [sum(values[i] * value for i, value in row.entries.items()) for row in rows]
        if all(row.lower <= total <= row.upper for row, total in zip(rows, sums, strict=True)):
            possible.append(sum(c.cost * value for c, value in zip(columns, values, strict=True)))
    found = minimise(columns, rows, gap=0.0)
    assert (found is None) == (not possible)
    if found is not None:
        cost = sum(c.cost * value for c, value in zip(columns, found.values, strict=True))
        assert cost == pytest.approx(min(possible), abs=1e-6)
        assert found.gap == 0.0


def market_split(size):
    """Few equations over many zeros and ones: known to be out of a solver's reach at 40 and more."""
    draw = random.Random(0)
    values = [[draw.randrange(100) for _ in range(size)] for _ in range(5)]
    rows = [LinearRow(dict(enumerate(row)), sum(row) // 2, sum(row) // 2) for row in values]
    return [Column(whole=True, upper=1) for _ in range(size)], rows


@pytest.mark.parametrize("limit", [{"nodes": 1}, {"patience_s": 0.3}])
def test_no_answer_within_limits_is_no_answer_that_nothing_fits(limit):
    with pytest.raises(FitError, match="Solver was stopped before it found a plan that fits"):
        minimise(*market_split(50), gap=0.0, **limit)


def knapsacks(size):
    """Four limits over items of nearly equal worth: an answer at once, no proof for long."""
    weights = [(i * 7919) % 997 + 1000 for i in range(size)]
    columns = [Column(-(weight + i * 31 % 17), upper=1, whole=True) for i, weight in enumerate(weights)]
    rows = [LinearRow({i: weights[(i * k) % size] for i in range(size)}, upper=20000) for k in (1, 7, 11, 13)]
    return columns, rows


@pytest.mark.parametrize(("limit", "by_clock"), [({"nodes": 5}, False), ({"patience_s": 0.3}, True)])
def test_an_answer_within_limits_says_how_far_it_may_be_from_the_best(limit, by_clock):
    found = minimise(*knapsacks(60 if by_clock else 30), gap=0.0, **limit)
    assert found is not None
    assert found.gap > 0
    assert found.by_clock is by_clock


@pytest.mark.parametrize(("size", "nodes"), [(12, 1), (20, 3), (30, 5)])
def test_a_limit_on_nodes_gives_the_same_answer_twice(size, nodes):
    """A solver that is stopped by the clock gives what it has then, and that is another thing each time."""
    first = minimise(*knapsacks(size), gap=0.0, nodes=nodes)
    integer_program._solved.cache_clear()
    assert minimise(*knapsacks(size), gap=0.0, nodes=nodes) == first

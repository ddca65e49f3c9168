"""Parts of the tests: each test is in one of them, the same one each time."""

import argparse
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import pytest_collection_modifyitems
from tests.contracts.test_makefile import make
from tests.draws import examples
from tests.parts import Part, part


@examples(60)
@given(st.lists(st.text(max_size=40), max_size=30), st.integers(1, 12))
def test_each_test_is_in_one_part(names, of):
    parts = [[name for name in names if Part(number, of).has(name)] for number in range(1, of + 1)]
    assert sorted(name for found in parts for name in found) == sorted(names)


def test_a_test_stays_in_its_part():
    """Whatever the process: `hash` of a text is another one in each."""
    names = ["tests/ops/test_ops.py::test_a", "tests/ops/test_ops.py::test_a[1]", "tests/test_ü.py::test_b"]
    assert [[number for number in range(1, 11) if Part(number, 10).has(name)] for name in names] == [[2], [5], [7]]


def test_parts_are_about_as_large():
    names = [f"tests/test_{file}.py::test_one[{case}]" for file in range(40) for case in range(25)]
    assert all(70 < sum(Part(number, 10).has(name) for name in names) < 130 for number in range(1, 11))


@pytest.mark.parametrize("asked", [None, "1/1", "1/3", "2/3", "3/3"])
def test_what_is_asked_for_runs_and_the_rest_is_deselected(asked):
    of = None if asked is None else part(asked)
    left = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config = SimpleNamespace(getoption={"part": of}.get, hook=hook)
    items = [SimpleNamespace(nodeid=f"tests/test_a.py::test_{number}") for number in range(20)]
    ran = items[:]
    pytest_collection_modifyitems(config, ran)
    assert ran == [item for item in items if of is None or of.has(item.nodeid)]
    assert left == [item for item in items if item not in ran]
    assert bool(left) == (asked not in (None, "1/1"))


@pytest.mark.parametrize("text", ["", "3", "0/10", "11/10", "1/0", "a/b", "1/2/3", "-1/4", "1.5/3"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="3/10 is the third of ten"):
        part(text)


def test_make_hands_the_part_on():
    assert "--part 3/10" in make("-n", "test-slow", "PART=3/10")
    assert "--part 1/1" in make("-n", "test-slow")

"""Names that differ by numbers, as one."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.units import collapse_names, pattern_of


def expanded(text: str) -> set[str]:
    """The names that a collapsed one stands for, by the rules of the shell."""
    parts = re.split(r"\{(.*?)\}", text)
    choices = []
    for number, part in enumerate(parts):
        if number % 2 == 0:
            choices.append([part])
            continue
        bounds = [one.split("-") for one in part.split(",")]
        choices.append([str(i) for bound in bounds for i in range(int(bound[0]), int(bound[-1]) + 1)])
    return {"".join(one) for one in itertools.product(*choices)}


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 12), min_size=1))
def test_a_collapsed_name_stands_for_exactly_its_names(layers, experts):
    names = [f"model.layers.{i}.conv2d.experts.{j}" for i in layers for j in experts]
    assert expanded(collapse_names(names)) == set(names)
    assert {pattern_of(name) for name in names} == {"model.layers.*.conv2d.experts.*"}


def test_names_without_numbers_stay():
    assert collapse_names(["lm_head"]) == pattern_of("lm_head") == "lm_head"
    assert collapse_names([""]) == pattern_of("") == ""
    assert collapse_names(["0", "1"]) == "{0-1}"

"""JSON without NaN: what is written can be read by a strict reader, and nothing else changes."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.json_text import finite, to_json

trees = st.recursive(
    st.none() | st.booleans() | st.text() | st.floats() | st.integers() | st.integers(10**308, 10**310),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def refuse(name: str) -> float:
    raise AssertionError(f"{name} in JSON")


@given(trees)
def test_text_has_no_constant_and_reads_back_as_the_finite_value(tree):
    found = json.loads(to_json(tree), parse_constant=refuse)
    assert found == finite(tree)
    assert to_json(found) == to_json(tree), "a second pass changes nothing"


@given(trees)
def test_every_number_that_is_left_is_a_double(tree):
    def numbers(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return [number for item in value for number in numbers(item)]
        return [value] if isinstance(value, int | float) else []

    assert all(math.isfinite(float(number)) for number in numbers(finite(tree)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [float, np.float32, torch.tensor], ids=["float", "numpy", "torch"])
def test_scalars_of_numpy_and_torch_through_default(value, wrap):
    assert to_json({"loss": wrap(value), "in a list": [(wrap(value),)]}, default=float) == (
        '{"loss": null, "in a list": [[null]]}'
    )
    assert to_json([wrap(1.5)], default=float) == "[1.5]"


def test_an_object_without_default_is_a_type_error():
    with pytest.raises(TypeError):
        to_json({"path": object()})

"""Artefacts beside a budget: over which targets rises are, which rows stand, which targets cannot be inside at all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.optim.test_citizen import assert_in_words
from tilewright.compress.budget.artefacts import judged, still_stand, unproven
from tilewright.compress.export.publish import artefact_bytes, artefact_hash
from tilewright.compress.export.targets import find_targets
from tilewright.core.errors import ConfigError

HF = replace(find_targets("hf")[0], why_not=lambda source: None)
SOURCE = SimpleNamespace(reads_images=False)
LOSSES = st.floats(0.1, 8.0)


@given(
    domains=st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 10_000), LOSSES, LOSSES), min_size=1),
    rise=st.floats(-0.5, 0.5),
    budget=st.floats(0.001, 0.5),
)
def test_a_rise_is_over_all_targets_whatever_domain_they_are_of(domains, rise, budget):
    """An export asks for as many answers of each domain; the budget is over held-out text as it is."""
    row = {
        "state": "ran",
        "loss": {name: {"fp32": ours, "consumer": theirs} for name, (_, ours, theirs) in domains.items()},
    }
    found = judged(row, {"rise": rise}, budget, {name: count for name, (count, _, _) in domains.items()})
    ours, theirs = (sum(count * losses[which] for count, *losses in domains.values()) for which in (0, 1))
    assert found["rise"] == pytest.approx((1 + rise) * theirs / ours - 1)
    assert found["inside"] == (found["rise"] <= budget)


@given(
    domains=st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 999), st.floats(0, 1), st.floats(0, 1)))
)
def test_points_are_over_all_images(domains):
    domains = domains or {"a": (1, 1.0, 0.0)}
    row = {
        "state": "ran",
        "right": {name: {"fp32": ours, "consumer": theirs} for name, (_, ours, theirs) in domains.items()},
    }
    counts = {name: count for name, (count, _, _) in domains.items()}
    found = judged(row, {"rise": 0.25, "equal_rise": None}, 0.5, counts, points=True)
    lost = sum(count * (ours - theirs) for count, ours, theirs in domains.values()) / sum(counts.values())
    assert found["rise"] == pytest.approx(0.25 + lost)


def test_rows_stand_until_something_could_be_otherwise(tmp_path):
    """A failure may have been a full disk or a limit of time; a package may be there now, a file may have changed."""
    path = tmp_path / "model"
    path.write_bytes(b"weights")
    ran = {"target": "hf", "state": "ran", "path": "model", "bytes": artefact_bytes(path), "hash": artefact_hash(path)}
    stand = lambda *rows, target=HF: still_stand(rows, [target], SOURCE, tmp_path)  # noqa: E731
    assert stand(ran)
    assert not stand()
    assert not stand(ran, {"target": "fp8", "state": "failed", "path": None})
    absent = replace(HF, packages=("no_such_package",), extra="hf")
    unavailable = {"target": "hf", "state": "unavailable", "path": None}
    assert stand(unavailable, target=absent)
    assert not stand(unavailable)
    path.write_bytes(b"others")
    assert not stand(ran)


def test_targets_that_cannot_be_inside_are_known_before_anything_is_measured():
    """Some are left to be tried; of all it is an error."""
    no_format = replace(HF, name="onnx", why_not=lambda source: "no graph form")
    no_runtime = replace(
        HF, name="gguf-f16", consumer=replace(HF.consumer, packages=("no_such_package",), extra="gguf")
    )
    found = unproven([HF, no_format, no_runtime], SOURCE)
    assert found.keys() == {"onnx", "gguf-f16"}
    assert found["onnx"] == "no graph form"
    assert "tilewright[gguf]" in found["gguf-f16"]
    with pytest.raises(ConfigError, match="None of the targets can be proven") as error:
        unproven([no_format, no_runtime], SOURCE)
    assert_in_words(error.value, "onnx: no graph form", "at least one")

"""Planned seconds of whole documents: attention takes those of the data's lengths, and nothing else moves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.observe import fixed_ceilings
from tests.draws import examples
from tests.training.tiny import settings as tiny_settings
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner.decide import decide
from tilewright.planner.site import Site

LENGTH = 256


def _plan(folder, share, **changes):
    values = tiny_settings(folder, folder, **{"model__num_layers": 4, "data__rows": "documents"} | changes)
    loaded = load_recipe(None, values | {"data.seq_len": str(LENGTH), "train.compile": "off"}, environ={})
    mesh = MeshSizes(pp=loaded.recipe.parallel.pp)
    site = Site(300, detect_machine("cpu"), fixed_ceilings(), folder, mesh=mesh, attention_share=share)
    return decide(loaded, site, "as_it_stands")


@pytest.fixture(scope="module")
def bounds(tmp_path_factory):
    """Plans of documents as full rows, and of ones without any pairs of positions, on one process and in stages."""
    folder = tmp_path_factory.mktemp("plans")
    return folder, {pp: (_plan(folder, 1.0, parallel__pp=pp), _plan(folder, 0.0, parallel__pp=pp)) for pp in (1, 2)}


@examples(8)
@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=40), st.sampled_from([1, 2]))
def test_seconds_of_attention_are_those_of_the_lengths(bounds, lengths, pp):
    """Between both bounds in proportion to the sum of L^2 over that of full rows of as many tokens."""
    folder, (full, least) = bounds[0], bounds[1][pp]
    lengths = np.array(lengths, np.float64)
    share = float((lengths**2).sum() / (lengths.sum() * LENGTH))
    found = _plan(folder, share, parallel__pp=pp)
    assert full.step_s > least.step_s
    want = least.step_s + share * (full.step_s - least.step_s)
    assert found.step_s == pytest.approx(want, rel=1e-9)
    assert found.peak_bytes == full.peak_bytes


@pytest.mark.parametrize("pp", [1, 2])
def test_a_plan_says_whether_it_knows_them(bounds, pp):
    folder, plans = bounds
    (told,) = [note for note in plans[pp][0].notes if note.startswith("whole documents are planned")]
    assert "the seconds of attention are those of the data's lengths" in told
    unknown = _plan(folder, None, parallel__pp=pp)
    (told,) = [note for note in unknown.notes if note.startswith("whole documents are planned")]
    assert "so are the seconds of attention" in told
    assert unknown.step_s == plans[pp][0].step_s


def test_packed_rows_are_full_rows(bounds):
    folder, _ = bounds
    changes = {"data__rows": "packed"}
    assert _plan(folder, 0.3, **changes).step_s == _plan(folder, None, **changes).step_s

"""The bound of a pipeline's rank: as its layers run, which are not compiled where weight gradients wait."""

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.training.tiny import settings
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner.decide import decide
from tilewright.planner.site import Site


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv", "dualpipe_v"])
def test_a_schedule_that_defers_is_planned_without_the_compiler(schedule, tmp_path):
    peaks = {}
    for compiles in ("auto", "off"):
        values = settings(tmp_path, tmp_path, model__num_layers=8, parallel__pp=2, parallel__schedule=schedule)
        values |= {"model.tie_embeddings": "false", "train.compile": compiles, "data.seq_len": "256"}
        loaded = load_recipe(None, values, environ={})
        site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=2))
        decision = decide(loaded, site, "as_it_stands")
        peaks[compiles] = decision.plan.peak_bytes
        assert any("wait with is not in the bytes" in note for note in decision.plan.notes)
    assert peaks["auto"] == peaks["off"]

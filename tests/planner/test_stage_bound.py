"""The bound of a pipeline's rank: as its layers run, which are not compiled where weight gradients wait."""

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.training.tiny import settings
from tilewright.core.config.executors import capabilities_of
from tilewright.core.config.load import load_recipe
from tilewright.core.hardware import detect_machine
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner.cost.choices import executors
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
        plan = decide(loaded, site, "as_it_stands")
        peaks[compiles] = plan.peak_bytes
        assert any("wait with is not in the bytes" in note for note in plan.notes)
    assert peaks["auto"] == peaks["off"]


@pytest.mark.parametrize("compiles", ["auto", "off"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_that_layers_stay_uncompiled_is_said(schedule, compiles, tmp_path):
    values = settings(tmp_path, tmp_path, model__num_layers=8, parallel__pp=2, parallel__schedule=schedule)
    loaded = load_recipe(None, values | {"model.tie_embeddings": "false", "train.compile": compiles}, environ={})
    site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=2))
    note = decide(loaded, site, "as_it_stands").stands_because
    assert ("layers are not compiled, since schedule zbv" in note) is ((schedule, compiles) == ("zbv", "auto"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision__mode": "hybrid"},
        {"optim__clip": "delayed", "memory__executor": "layer_major"},
        {"lora__rank": 4},
    ],
)
def test_stages_are_run_by_an_executor_of_stages_and_nothing_else_is(changes, tmp_path):
    recipe = load_recipe(None, settings(tmp_path, tmp_path, **changes), environ={}).recipe
    assert executors(recipe)
    assert not any(capabilities_of(name).stages for name in executors(recipe))
    staged = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"pp": 2})})
    assert all(capabilities_of(name).stages for name in executors(staged))

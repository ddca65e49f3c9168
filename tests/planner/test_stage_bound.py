"""The bound of a pipeline's rank: as its layers run, which are not compiled where weight gradients wait."""

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.models.shapes import KERNELS
from tests.training.tiny import settings
from tilewright.core.config.executors import capabilities_of
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.models.build import decoder_config
from tilewright.models.decoder.decoder import Decoder
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group
from tilewright.planner.cost.layer_choices import executors
from tilewright.planner.decide import decide
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.site import Site


@pytest.mark.parametrize("schedule", ["interleaved_deferred", "interleaved_zero_bubble", "zbv", "dualpipe_v"])
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


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("pp", [1, 2])
def test_adapters_of_one_layer_are_planned(pp, layer, tmp_path):
    """Layers differ then in what is trained; a name counts from the whole model's first layer."""
    values = settings(tmp_path, tmp_path, model__num_layers=4, parallel__pp=pp, lora__rank=4,
                      lora__base="keep", train__global_batch_size=4)  # fmt: skip
    plans = {}
    for targets in (f'["*layers.{layer}.mlp.*"]', '["*layers.*.mlp.*"]'):
        loaded = load_recipe(None, values | {"lora.targets": targets}, environ={})
        site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=pp))
        plans[targets] = decide(loaded, site, "as_it_stands")
    one, every = plans.values()
    assert sum(found.count for found in one.shape.classes if found.weights.trained) in ({1} if pp == 1 else {0, 1})
    assert one.shape.num_layers == every.shape.num_layers == 4 // pp
    assert one.peak_bytes <= every.peak_bytes


@pytest.mark.parametrize("targets", ['["*layers.4.*"]', '["*layers.0.*", "*.q_porj"]'])
def test_targets_that_no_layer_has_are_an_error_of_the_plan(targets, tmp_path):
    values = settings(tmp_path, tmp_path, model__num_layers=4, lora__rank=4) | {"lora.targets": targets}
    site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes())
    with pytest.raises(ConfigError, match="Adapter target matches no linear layer"):
        decide(load_recipe(None, values, environ={}), site, "as_it_stands")


@pytest.mark.parametrize("split", [[1, 3], [3, 1], [2, 2], []])
def test_layers_of_several_kinds_are_those_of_some_rank(split, tmp_path):
    """Dense layers first, then experts."""
    values = settings(tmp_path, tmp_path, model__num_layers=4, model__num_experts=4, model__num_experts_per_token=2,
                      model__expert_dim=16, model__num_dense_layers=3, parallel__pp=2,
                      train__global_batch_size=4, parallel__split=split)  # fmt: skip
    site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=2))
    found = decide(load_recipe(None, values, environ={}), site, "as_it_stands").shape
    indices = sorted(index for kind in found.classes for index in kind.indices)
    assert indices == list(range(found.num_layers))
    assert found.num_layers in (split or [2, 2])


ALIKE = "[]"
WIDE_FIRST = "[{ ffn_dim = 512, repeat = 2 }, { ffn_dim = 32, repeat = 6 }]"
WINDOWS_LAST = "[{ ffn_dim = 32, repeat = 4 }, { ffn_dim = 32, sliding_window = 8, repeat = 4 }]"
LINEAR_LAST = (
    "[{ num_heads = 8, num_kv_heads = 8, ffn_dim = 64, repeat = 2 }, "
    '{ ffn_dim = 32, attention = "linear", repeat = 6 }]'
)


@pytest.mark.parametrize(
    ("schedule", "tp", "layers", "split"),
    [
        ("1f1b", 1, ALIKE, (5, 3)),
        ("1f1b", 2, ALIKE, (5, 3)),
        ("interleaved", 1, ALIKE, (3, 2, 2, 1)),
        ("zbv", 1, ALIKE, (2, 3, 2, 1)),
        ("1f1b", 1, WIDE_FIRST, (2, 6)),
        ("1f1b", 2, WIDE_FIRST, (2, 6)),
        ("interleaved", 1, WIDE_FIRST, (1, 2, 3, 2)),
        ("1f1b", 1, WINDOWS_LAST, (3, 5)),
        ("zbv", 1, LINEAR_LAST, (1, 2, 2, 3)),
    ],
)
def test_plan_simulation_and_run_have_the_same_layers_in_each_stage(schedule, tp, layers, split, tmp_path):
    """By what they and the head cost."""
    vocab = 3000 if layers == ALIKE else 300
    values = settings(tmp_path, tmp_path, model__num_layers=8, model__dim=64, model__num_heads=4,
                      model__num_kv_heads=4, parallel__pp=2, parallel__tp=tp, parallel__schedule=schedule)  # fmt: skip
    values |= {"model.layers": layers, "ops.cross_entropy": "native", "data.seq_len": "256"}
    loaded = load_recipe(None, values, environ={})
    recipe, site = (
        loaded.recipe,
        Site(vocab, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=2, tp=tp)),
    )
    plan = decide(loaded, site, "as_it_stands")
    assert plan.split == split
    assert any(", ".join(map(str, split)) in note for note in plan.notes)
    whole = MeshModel(recipe, vocab, site.machine, site.rates, site.shapes).whole
    assert tuple(map(len, Pipeline.of(recipe.parallel).split(8, whole.layer_costs, whole.end_costs))) == split
    pipeline, config, held = Pipeline.of(plan.held(recipe.parallel)), decoder_config(recipe.model, vocab), {}
    for rank in range(2):
        part = hold_stages(Decoder(config, KERNELS), pipeline, Group(rank, 2))
        held |= {stage.index: len(stage.layers) for stage in part.stages}
    assert tuple(count for _, count in sorted(held.items())) == split


@pytest.mark.parametrize("layers", [WIDE_FIRST, "[]"])
def test_a_split_that_is_said_stays(layers, tmp_path):
    values = settings(tmp_path, tmp_path, model__num_layers=8, model__dim=64, model__num_heads=4,
                      parallel__pp=2, parallel__split="[7,1]")  # fmt: skip
    site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=2))
    plan = decide(load_recipe(None, values | {"model.layers": layers}, environ={}), site, "as_it_stands")
    assert plan.split == (7, 1)
    assert not any("parallel.split" in note for note in plan.notes)
    even = decide(load_recipe(None, values | {"parallel.split": "[]"}, environ={}), site, "as_it_stands")
    assert even.split == (), "layers that are alike: as many in each"


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_stage_of_cut_matrices_takes_less(schedule, tmp_path):
    """A process has half of each matrix of its stages, and of what is kept between attention and MLP."""
    bytes_of = {}
    for tp in (1, 2):
        values = settings(tmp_path, tmp_path, model__num_layers=4, model__dim=64, model__num_heads=4,
                          model__num_kv_heads=4, model__ffn_dim=256, parallel__pp=2, parallel__tp=tp,
                          parallel__schedule=schedule)  # fmt: skip
        values |= {"train.compile": "off", "ops.cross_entropy": "native", "data.seq_len": "256"}
        site = Site(300, detect_machine("cpu"), fixed_ceilings(), tmp_path, mesh=MeshSizes(pp=2, tp=tp))
        plan = decide(load_recipe(None, values, environ={}), site, "as_it_stands")
        bytes_of[tp] = plan.shape.weights.stored, plan.peak_bytes - plan.shape.process_bytes
        assert plan.shape.num_layers == 2
    (weights, peak), (weights_cut, peak_cut) = bytes_of[1], bytes_of[2]
    assert 0.5 <= weights_cut / weights < 0.52, "norms alone are whole"
    assert peak_cut < 0.7 * peak

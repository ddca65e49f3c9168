"""A search over meshes: as good as pricing every setting, the same twice, and what it says where nothing fits."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from tests.planner.simulate.here import tables_here
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.core.hardware import detect_machine
from tilewright.models.build import build_model
from tilewright.parallel.communicate.wire_messages import row_bytes
from tilewright.parallel.inside.tensor.matrix_cuts import check_cuts
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.machine.gpu_specs import HOST_BYTES, find_published
from tilewright.planner.simulate.mesh.cluster import cluster_of
from tilewright.planner.simulate.mesh.mesh_model import MeshModel
from tilewright.planner.simulate.mesh.mesh_search import MeshSearch
from tilewright.planner.simulate.mesh.mesh_setting import MeshSetting
from tilewright.planner.simulate.mesh.setting_space import Space
from tilewright.planner.simulate.mesh.setting_step import MeshCosts, MeshRates
from tilewright.planner.simulate.schedule_table import ScheduleTable
from tilewright.planner.simulate.simulated_step import SimulatedStep
from tilewright.planner.simulate.torch_tables import Asked

DENSE = {
    "model.dim": "4096", "model.num_layers": "16", "model.num_heads": "32", "model.num_kv_heads": "8",
    "model.ffn_dim": "14336", "model.tie_embeddings": "false", "data.vocab_size": "128256", "data.seq_len": "4096",
    "precision.mode": "bf16_mixed", "train.global_batch_size": "16",
}  # fmt: skip
MOE = DENSE | {
    "model.num_experts": "16", "model.num_experts_per_token": "2", "model.expert_dim": "4096",
    "model.num_dense_layers": "1",
}  # fmt: skip
ROUNDING = 1e-9
TABLES: dict[Asked, ScheduleTable] = {}


def rates_of(settings, world, nodes=""):
    recipe = load_recipe("default", settings, environ={}).recipe
    row = find_published("h100")
    machine = row.machine(detect_machine("cpu"), HOST_BYTES)
    model = MeshModel(recipe, recipe.data.vocab_size, machine, row.ceilings())
    return MeshRates(model, cluster_of("h100", world, nodes, []))


@pytest.fixture(scope="module")
def dense():
    return rates_of(DENSE, 8, "2x4")


def search_of(rates, gib, **changes):
    world, gpus = rates.cluster.world, rates.cluster.gpus
    space = replace(Space.of(rates.model, world, gpus), **changes)
    return MeshSearch(rates, space, gib * 2**30, 989.5e12, made_once)


def made_once(asked):
    """The table of a schedule, made in this process."""
    if asked not in TABLES:
        TABLES.update(tables_here([asked]))
    return TABLES[asked]


@pytest.mark.parametrize("gib", [20, pytest.param(28, marks=pytest.mark.slow), 70])
def test_as_good_as_every_setting(dense, gib):
    few = {"schedules": ("1f1b", "zbv"), "kinds": ("keep", "recompute")}
    search = search_of(dense, gib, **few)
    found = search.best(3, [("fp32", "fp32")])
    every = sorted((one for one in search.all("fp32", "fp32") if one.fits), key=lambda one: one.seconds)
    best = [one.seconds for one in found.best]
    print([one.seconds for one in every[:3]], best, found.simulated, found.settings)
    assert len(best) == min(3, len(every))
    for mine, other in zip(best, every, strict=False):
        assert mine <= other.seconds * (1 + ROUNDING)


def test_the_same_answer_twice(dense):
    first, second = (search_of(dense, 30, schedules=("1f1b", "zbv")).best(5, [("fp32", "fp32")]) for _ in range(2))
    assert [str(one.setting) for one in first.best] == [str(one.setting) for one in second.best]
    assert [one.seconds for one in first.best] == [one.seconds for one in second.best]


def test_no_step_is_below_its_bound_and_shares_add_up(dense):
    space = Space.of(dense.model, 8, 4)
    search = MeshSearch(dense, space, 80 * 2**30, 989.5e12, made_once)
    groups = random.sample(list(space.settings("fp32", "fp32")), 16)
    for one in (search._costs(group, kind) for group in groups for kind in ("keep", "recompute")):
        step = search.simulated(one)
        assert one.least_s <= one.bound_s * (1 + ROUNDING), str(one.setting)
        assert step.seconds >= one.bound_s * (1 - ROUNDING), str(one.setting)
        assert math.fsum(step.parts.values()) == pytest.approx(1.0, abs=1e-6), (str(one.setting), step.parts)
        assert all(share >= -ROUNDING for share in step.parts.values()), (str(one.setting), step.parts)
        assert sum(step.setting.pipeline.layers or (16,)) == 16
        if step.simulated is not None:
            assert step.costs.row_s(step.table) == step.simulated.seconds


def test_passes_are_simulated_once_for_meshes_that_differ_in_copies_alone(dense, monkeypatch):
    made, simulate = [], SimulatedStep.of
    monkeypatch.setattr(SimulatedStep, "of", lambda *args: made.append(args) or simulate(*args))
    rates = MeshRates(dense.model, dense.cluster)
    seconds = []
    for copies in (1, 2):
        sizes = MeshSizes(pp=2, dp_replicate=copies, dp_shard=4 // copies)
        costs = MeshCosts(rates, MeshSetting(sizes, Pipeline(2), 1, 4, "keep", "fp32", "fp32"))
        seconds.append(costs.row_s(made_once((Pipeline(2), 4))))
    assert len(made) == 1
    assert seconds[0] == seconds[1]


def test_narrower_formats_come_in_only_where_the_wide_ones_do_not_fit(dense):
    formats = [("fp32", "fp32"), ("8bit", "fp32")]
    assert search_of(dense, 70).best(1, formats).formats == ("fp32", "fp32")
    few = {"schedules": ("1f1b",), "kinds": ("recompute",)}
    for gib in range(5, 20):
        found = search_of(dense, gib, **few).best(1, formats)
        if found.best:
            break
    assert found.formats == ("8bit", "fp32"), gib


def test_nothing_fits(dense):
    found = search_of(dense, 1).best(5, [("fp32", "fp32")])
    assert not found.best
    assert found.nearest is not None
    assert found.nearest.worst.peak > 2**30


@pytest.mark.parametrize("model", [DENSE, MOE])
def test_the_nearest_miss_is_that_of_all_settings(model):
    few = {"schedules": ("1f1b", "zbv"), "kinds": ("keep", "recompute")}
    search = search_of(rates_of(model | {"train.global_batch_size": "8"}, 4), 1, **few)
    least = min(one.worst.peak for one in search.all("8bit", "fp32"))
    assert search.nearest("8bit", "fp32").worst.peak == least
    assert not search.fits("8bit", "fp32")


@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_matrices_are_cut_where_a_run_can_cut_them(model):
    """As `parallel.inside.tensor.matrix_cuts` refuses what does not come out even."""
    latent = {"model.attention": "mla", "model.num_kv_heads": "0"} if model == "mla" else {"model.num_kv_heads": "4"}
    sizes = {"model.dim": "96", "model.num_heads": "12", "model.ffn_dim": "192", "model.head_dim": "8"}
    rates = rates_of(DENSE | latent | sizes | {"data.vocab_size": "512", "train.global_batch_size": "64"}, 32, "4x8")
    whole = build_model(rates.model.recipe.model, 512, device="meta")
    found = {(one.tp, one.dp_shard) for one in Space.of(rates.model, 32, 8).meshes()}
    for tp, shards in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32)):
        if tp * shards > 32:
            continue
        try:
            check_cuts(whole, tp, shards)
            can = True
        except ConfigError:
            can = tp == 1
        assert ((tp, shards) in found) == can, (tp, shards)


@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_gradients_in_a_wire_format_take_its_share_of_bytes(dense, wire):
    """In a node, where a ring and an exchange pass as many bytes; between nodes ranks exchange over their own links."""
    share = row_bytes(1280, wire) / row_bytes(1280, "fp32")
    for sizes in (MeshSizes(dp_shard=4), MeshSizes(dp_replicate=4), MeshSizes(pp=2, dp_shard=2, dp_replicate=2)):
        whole, sent = (
            MeshCosts(dense, MeshSetting(sizes, Pipeline(sizes.pp), 1, 4, "keep", "fp32", "fp32", wire=one)).exposed
            for one in ("fp32", wire)
        )
        assert sent.gather == whole.gather
        if sizes.dp_shard == 1 or sizes.pp > 1:
            assert sent.reduce == pytest.approx(share * whole.reduce, rel=0.02), (sizes, whole, sent)  # latencies
        assert sent.reduce <= whole.reduce * (1 + ROUNDING)


def test_experts_are_spread_where_that_pays():
    rates = rates_of(MOE, 8, "1x8")
    found = search_of(rates, 70).best(5, [("fp32", "fp32")])
    assert found.best
    whole = {one.setting.sizes.ep for one in found.best}
    assert max(whole) > 1, whole
    for one in found.best:
        assert one.setting.sizes.dp_shard % one.setting.sizes.ep == 0

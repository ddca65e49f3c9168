"""A run on ranks has its simulated step in plan.json; bytes, bound and memory hold beside what it measures."""

import json

import pytest

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import runs
from tests.training.tiny import rows
from tilewright.planner import site
from tilewright.planner.cost.rank_traffic import RankSpeed
from tilewright.report.run_data.collect_run import collect
from tilewright.report.run_data.forecast_table import forecast_view, measured

pytestmark = pytest.mark.dist
SMALL = {
    "train__steps": 2, "train__global_batch_size": 4, "train__micro_batch_size": 1, "train__eval_interval": 0,
    "train__sample_tokens": 0, "train__log_interval": 1, "checkpoint__interval": 0, "log__report": "false",
    "model__dim": 128, "model__num_layers": 4, "model__num_heads": 4, "data__seq_len": 128, "optim__kind": "adamw",
    "precision__mode": "fp32", "parallel__dp_shard": 1, "ops__cross_entropy": "native",
}  # fmt: skip
TWO = {"shards": {"parallel__dp_shard": 2}, "stages": {"parallel__pp": 2}}
MORE = {
    "matrices": {"parallel__tp": 2},
    "copies": {"parallel__dp_replicate": 2},
    "experts": {
        "parallel__dp_shard": 2, "parallel__ep": 2, "model__num_experts": 4, "model__num_experts_per_token": 2,
        "model__expert_dim": 64,
    },
    "v": {"parallel__pp": 2, "parallel__schedule": "zbv", "train__activation_checkpoint": "full"},
}  # fmt: skip
FOUR = {
    "stages of shards": {"parallel__pp": 2, "parallel__dp_shard": 2},
    "cut shards": {"parallel__tp": 2, "parallel__dp_shard": 2, "train__activation_checkpoint": "full"},
}
NAMES = [*TWO, *(pytest.param(name, marks=pytest.mark.slow) for name in (*MORE, *FOUR))]
SPEED = RankSpeed(gather=1e9, scatter=1e9, reduce=0.5e9, exchange=1e9)
"""Of whole tensors: a sum that all have takes as long as a sum in parts and a gather."""


def simulated(rank, data, folder, changes):
    """Runs of this rank; what processes exchange is not measured."""
    site.rank_speed = lambda machine, ranks, progress=None: None if ranks == 1 else SPEED  # this process is the test's
    return runs(rank, data, folder, changes)


@pytest.fixture(scope="module")
def found(data, tmp_path_factory):
    """The folder of a run by its case; those of a group are made together, when the first one is asked for."""
    folder, made = tmp_path_factory.mktemp("simulated"), {}

    def folder_of(name):
        if name not in made:
            cases, world = next((cases, 4 if cases is FOUR else 2) for cases in (TWO, MORE, FOUR) if name in cases)
            changes = {name: SMALL | case for name, case in cases.items()}
            of_first = on_ranks(world, simulated, str(data), str(folder), changes)[0]
            for case in cases:
                assert not isinstance(of_first[case], str), of_first[case]
                made[case] = folder / case
        return made[name]

    return folder_of


@pytest.mark.parametrize("name", NAMES)
def test_bytes_by_axis_are_those_that_are_counted(found, name):
    told = json.loads((found(name) / "plan.json").read_text())["simulated"]
    counted = measured(collect(found(name)))["sent_bytes"]
    print(name, told["sent_bytes"], counted)
    for axis, size in told["sent_bytes"].items():
        # losses and norms of a few numbers are counted, three numbers per token of the loss of a cut head
        close = 0.25 if axis == "ep" else 0.04  # routing is taken for even
        assert counted[axis] == pytest.approx(size, rel=close), (axis, told["sent_bytes"], counted)
    assert counted.keys() == told["sent_bytes"].keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_respects_its_bound_and_has_all_of_it(found, name):
    told = json.loads((found(name) / "plan.json").read_text())["simulated"]
    stages = name in ("stages", "v", "stages of shards")
    assert told["step_s"] > 0
    assert 0 <= told["exchange_s"] <= told["bound_s"] * (1 + 1e-9)
    assert (told["idle"] is None) == (not stages)
    assert len(told["peak_bytes"]) == (2 if stages else 1)
    if stages:
        assert 0 < told["idle"] < 1
    labels = [row[0] for row in forecast_view(collect(found(name))).rows]
    assert labels[0] == "Step"
    assert sum(label.startswith("Memory of rank") for label in labels) == (4 if name in FOUR else 2)


@pytest.mark.parametrize(
    "name", ["shards", *(pytest.param(name, marks=pytest.mark.slow) for name in ("copies", "matrices"))]
)
def test_without_stages_a_step_is_that_of_the_plan(found, name):
    """Nothing is hidden on a CPU."""
    plan = json.loads((found(name) / "plan.json").read_text())
    assert plan["simulated"]["step_s"] == pytest.approx(plan["step_s"], rel=1e-3)
    assert rows(found(name) / "metrics.jsonl")

"""What a run counts of its exchanges: stages, cut matrices, copies under the layer-major executor; and in a plan."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import on_ranks
from tests.training.test_pipeline_run import runs
from tests.training.tiny import rows
from tilewright.parallel.communicate.traffic import TrafficCounter
from tilewright.parallel.inside.tensor.collectives import TensorRanks
from tilewright.parallel.world import Group

pytestmark = pytest.mark.dist
SMALL = {
    "train__steps": 2, "train__global_batch_size": 4, "train__micro_batch_size": 2, "train__eval_interval": 0,
    "train__sample_tokens": 0, "checkpoint__interval": 0, "log__report": "false", "precision__mode": "fp32",
}  # fmt: skip
WIDTH, LENGTH, ROWS, LAYERS = 32, 32, 4, 2
STREAM = 4 * WIDTH * LENGTH * ROWS
"""Bytes of the residual stream of a step's rows."""


@pytest.fixture(scope="module")
def metrics(data, tmp_path_factory):
    """By run, the rows of its metrics."""
    folder = tmp_path_factory.mktemp("traffic")
    changes = {
        "stages": {"parallel__pp": 2},
        "matrices": {"parallel__tp": 2, "ops__cross_entropy": "native", "parallel__sequence_parallel": "false"},
        "layer_major": {"memory__executor": "layer_major", "parallel__dp_replicate": 2, "parallel__dp_shard": 1},
        "copies": {"parallel__dp_replicate": 2, "parallel__dp_shard": 1},
    }
    for found in on_ranks(2, runs, str(data), str(folder), {name: SMALL | one for name, one in changes.items()}):
        for name in changes:
            assert not isinstance(found[name], str), found[name]
    of_run = {name: rows(folder / name / "metrics.jsonl") for name in changes}
    return {name: [row for row in found if "loss" in row] for name, found in of_run.items()}


@pytest.mark.slow
def test_stages_count_what_they_pass_on(metrics):
    for row in metrics["stages"]:
        assert row["sent_bytes.pp.send.fp32"] == STREAM, "the first of two stages sends each row forward once"
        assert 0 < row["exchange_exposed_s.pp"] < row["step_s"], "it waits for gradients of the other one"
        assert row["exchange_hidden_s.pp"] == 0


@pytest.mark.slow
def test_cut_matrices_count_their_sums(metrics):
    for row in metrics["matrices"]:
        # two sums per layer and direction at the least, of each of which a rank of two sends as much as there is; the
        # embedding's sum, and the gradient of what the head reads; three numbers per token of the loss
        sums, loss = divmod(row["sent_bytes.tp.all_reduce.fp32"], STREAM)
        assert sums >= 4 * LAYERS + 2
        assert loss == 3 * 4 * ROWS * LENGTH
        assert row["exchange_exposed_s.tp"] > 0


@pytest.mark.slow
def test_layer_groups_count_their_gradients(metrics):
    for ours, theirs in zip(metrics["layer_major"], metrics["copies"], strict=True):
        name = "sent_bytes.dp_replicate.all_reduce.fp32"
        assert theirs[name] > 0
        assert ours[name] == 2 * theirs[name], "once for the norm, and once for the update"


def _collectives(rank):
    traffic = TrafficCounter()
    ranks = TensorRanks(Group(rank, 2, dist.group.WORLD), traffic)
    found = []
    for function in (ranks.spread, ranks.joined, ranks.gathered):
        x = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
        out = function(x)
        forward = traffic.take()
        out.sum().backward()
        found.append([
            {kind: one.sent_bytes for kind, one in kinds.items()} for kinds in (forward, traffic.take())
        ])  # fmt: skip
    return found


def test_each_collective_of_cut_matrices_is_counted():
    sums, parts = {("tp", "all_reduce", "bf16"): 48}, {("tp", "all_gather", "bf16"): 48}
    assert on_ranks(2, _collectives) == [[[{}, sums], [sums, {}], [parts, {}]]] * 2

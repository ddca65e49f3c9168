"""One batch over 1, 2 and 4 ranks: the same evidence, the same decisions on each rank, the same formats at the end."""

import json
import math

import pytest
import torch
import torch.distributed as dist

from tests.models.shapes import make_batch, make_decoder
from tests.ranks import on_ranks
from tilewright.data.batches.microbatches import count_targets
from tilewright.optim.clip import GradClip
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.convert import convert
from tilewright.precision.policy.policy import Policy
from tilewright.training.executor.standard import StandardExecutor

ROWS, STEPS = 4, 16


def decide(rank: int, world: int) -> list[dict]:
    """What a rank does with its share of each step's micro-batches."""
    model = make_decoder("gqa")
    convert(model, Policy("fp8_tile", keep="value"))
    settings = ControllerSettings(budget=0.6, cooldown=3, patience=1, interval=3, recalibrate_interval=1000)
    group = dist.group.WORLD if world > 1 else None
    control = PrecisionController(model, settings, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    executor = StandardExecutor(model, optimizer, clip=GradClip(1.0), control=control, data=group, everyone=group)
    told = []
    for step in range(STEPS):
        if step == 5:
            _spoil(model, 2.0**24)  # one feature so large that others are flushed
        if step == 8:
            _spoil(model, 1.0)
        batches = [make_batch(rows=1, seed=10 * step + row) for row in range(rank, ROWS, world)]
        if step == 14:
            _empty(batches, rank == world - 1)
        control.enter(step)
        if control.due(step):
            control.sample(step, [_pass(model, batch) for batch in batches])
        result = executor.step(batches, lr=1e-2)
        told.append({"redone": result.redone is not None, "skipped": result.skipped is not None})
        if control.controller.suspect is not None:
            control.sample(step, [_pass(model, batch) for batch in batches])
        told += [{k: v for k, v in row.items() if k != "noise"} for row in control.take_rows()]
    return [*told, {"state": control.controller.state_dict()["units"]}]


def _pass(model, batch):
    return lambda: (model.loss(batch).loss_sum / count_targets([batch])).backward()


@torch.no_grad()
def _spoil(model, factor):
    """A norm's weight blows one feature of the inputs of the first layer's attention up."""
    norm = model.model.layers[0].input_layernorm
    norm.weight[0] = factor


def _empty(batches, mine):
    """The last rank has a row without targets."""
    if mine:
        batches[-1]["labels"] = torch.full_like(batches[-1]["labels"], -100)


def decisions(told):
    """Who moved when and where to; numbers of evidence may differ in their last digits, as sums over ranks do."""
    return [
        {key: value for key, value in row.items() if key not in ("layers", "value", "threshold", "above_8bit")}
        for row in told
    ]


@pytest.fixture(scope="module")
def alone():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told = json.loads(json.dumps(decide(0, 1)))
    torch.set_num_threads(threads)
    return told


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.support("controller", "one", "copies")
def test_ranks_decide_alike_and_as_one_process_does(world, alone):
    told = [json.loads(json.dumps(rows)) for rows in on_ranks(world, decide, world)]
    for rank in range(1, world):
        assert told[rank] == told[0], rank
    assert decisions(told[0]) == decisions(alone)
    moves = [row for row in alone if row.get("kind") == "move"]
    assert {row["after"] for row in moves} >= {"bf16", "fp8_tile"}, "up and down again"
    # The first sample is of weights that are still bitwise equal: evidence must be, too.
    first = [next(row for row in rows if row.get("kind") == "sample") for rows in (told[0], alone)]
    assert first[0] == first[1]


def _reduce(rank: int) -> dict:
    from tilewright.precision.controller.layer_statistics import GemmStats, LayerStats, QuantStats
    from tilewright.precision.controller.monitor import all_reduce_worst

    good, broken = GemmStats(1.0, 1.0, 1.0, 30.0), GemmStats(math.nan, 1.0, 0.9, 40.0)
    mine = {"a": LayerStats(matmuls={"fprop.fp8_tile": (good, broken)[rank]})}
    if rank == 1:  # an expert that saw rows on this rank alone
        mine["b"] = LayerStats(matmuls={"dgrad.fp8_tile": good})
    found = all_reduce_worst(QuantStats(mine), ["a", "b", "c"], group=dist.group.WORLD)
    return found.to_json()


@pytest.mark.dist
def test_evidence_of_one_rank_counts_on_all_of_them():
    a, b = on_ranks(2, _reduce)
    assert a == b
    assert a["a"]["matmuls"]["fprop.fp8_tile"] == {
        "gain_low": "-inf", "gain_high": 1.0, "cosine": 0.9, "sqnr_db": 30.0,
    }  # fmt: skip
    assert a["b"]["matmuls"]["dgrad.fp8_tile"]["sqnr_db"] == 30.0
    assert "c" not in a

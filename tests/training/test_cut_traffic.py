"""What ranks with other parts of matrices exchange in a step, as planned and as real steps count it."""

import itertools
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.planner.rates import make_machine
from tests.ranks import on_ranks
from tests.training.tiny import tiny
from tilewright.parallel.launch import launched
from tilewright.parallel.mesh import MeshSizes
from tilewright.planner import site
from tilewright.planner.cost.rank_traffic import RankSpeed, RankTraffic, cut_traffic
from tilewright.planner.machine import ceilings
from tilewright.planner.model.layer_classes import ShapeFinder
from tilewright.training.assemble import build, set_up

SMALL = {
    "model__dim": 256, "model__num_heads": 4, "data__seq_len": 256, "train__global_batch_size": 2,
    "train__micro_batch_size": 1, "parallel__tp": 2, "parallel__dp_shard": 1, "optim__kind": "adamw",
    "ops__cross_entropy": "native",
}  # fmt: skip
FEW = [("true", "fp8_tile", "selective"), ("false", "fp32", "none")]
ALL = list(itertools.product(("true", "false"), ("fp32", "bf16_mixed", "fp8_tile"), ("none", "full", "selective")))
"""Slices of the stream or all of it, a precision mode, what is computed again."""
REST = 0.02
"""Three numbers of four bytes per token of the loss, and gradients of norms."""


def exchanged(rank, data, runs, cases):
    """Of each case the bytes that this rank has sent in a second step, by operation, and those that are planned."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    site.rank_speed = lambda machine, ranks, progress=None: RankSpeed(1e9, 2e9, 4e9, 1e9)
    found = []
    for sliced, mode, kept in cases:
        more = {"parallel__sequence_parallel": sliced, "precision__mode": mode, "train__activation_checkpoint": kept}
        loaded = tiny(Path(data), Path(runs), **SMALL | more)
        with launched(MeshSizes.of(loaded.recipe.parallel), device="cpu", timeout_s=60) as world:
            setup = set_up(loaded, world=world)
            parts = build(setup, fresh=True)
            parts.modes.enter(0)
            parts.executor.step(parts.stream.next_step(), 1e-3)
            world.traffic.take()
            parts.executor.step(parts.stream.next_step(), 1e-3)
            parts.close()
            sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
            for (axis, operation, _), one in world.traffic.take().items():
                assert axis == "tp"
                sent[operation] += one.sent_bytes
        plan = setup.plan
        again = {} if kept == "none" else {one.name: one.count for one in plan.shape.classes}
        planned = cut_traffic(plan.shape, setup.recipe, 1, 2, again)
        found.append((sent, vars(planned), plan.seconds["communication"]))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_bytes_are_those_of_real_steps_and_in_the_seconds_of_the_plan(cases, data, tmp_path):
    results = on_ranks(2, exchanged, str(data), str(tmp_path), cases)[0]
    for case, (sent, planned, seconds) in zip(cases, results, strict=True):
        of_two = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1.0}  # sent of a whole tensor
        names = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
        whole = sum(planned.values())
        for operation, share in of_two.items():
            off = abs(sent[operation] - share * planned[names[operation]])
            assert off <= REST * whole, (case, operation, sent, planned)
        assert seconds == pytest.approx(planned["gather"] / 1e9 + planned["scatter"] / 2e9 + planned["reduce"] / 4e9)


def test_nothing_is_exchanged_where_nothing_is_cut(data, tmp_path):
    recipe = tiny(data, tmp_path).recipe
    shape = ShapeFinder(300, make_machine()).find(recipe)
    assert cut_traffic(shape, recipe, 2, 3, {}) == RankTraffic()

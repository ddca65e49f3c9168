"""Experts move at a checkpoint to where their rows are balanced; the run is the one in which they stay, bit for bit."""

import itertools
import math
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contracts.observe import fixed_ceilings
from tests.draws import examples
from tests.ranks import on_ranks
from tests.training.test_experts_run import MIXED
from tests.training.tiny import last_state, rows, tiny
from tilewright.core.config.load import load_recipe
from tilewright.core.errors import ConfigError
from tilewright.parallel.inside.experts import placement
from tilewright.parallel.inside.experts.hold import check_order
from tilewright.parallel.inside.experts.placement import balanced, fullest, worth
from tilewright.planner.machine import ceilings
from tilewright.training.hooks import expert_hook
from tilewright.training.hooks.base import AfterStep
from tilewright.training.planning import pace
from tilewright.training.session import train

RUN = MIXED | {
    "train__steps": 5000, "train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false",
    "train__global_batch_size": 4, "checkpoint__interval": 4, "optim__schedule": "constant", "optim__clip_norm": 0,
    "model__num_experts": 8, "model__num_layers": 3, "parallel__ep": 2, "train__log_interval": 1,
}  # fmt: skip
STOP = 6


@examples(50)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10_000))
def test_balanced_orders_are_near_the_best(ranks, each, seed):
    """All experts once, as many on each rank, in their order there; within 4/3 of the best, as for packing so."""
    load = torch.rand(ranks * each, generator=torch.Generator().manual_seed(seed)).pow(3).tolist()
    order = balanced(load, ranks)
    assert sorted(order) == list(range(ranks * each))
    check_order(order, ranks * each, 1, ranks)
    found = fullest(load, order, ranks)
    assert found <= fullest(load, range(ranks * each), ranks) + 1e-9 or found <= 4 / 3
    if ranks == 2:
        best = min(
            fullest(load, (*held, *(e for e in range(2 * each) if e not in held)), 2)
            for held in itertools.combinations(range(2 * each), each)
        )
        assert found <= 4 / 3 * best + 1e-9, (load, order)


def test_experts_stay_where_a_move_is_not_worth_it():
    loads, now = [[9.0, 8.0, 1.0, 2.0]], ((0, 1, 2, 3),)
    move = worth(loads, now, 2, steps_left=100, step_s=1.0, move_s=10.0)
    assert move is not None
    assert (move.orders, move.before, move.after) == (((0, 2, 1, 3),), 1.7, 1.0)
    assert worth(loads, now, 2, steps_left=40, step_s=1.0, move_s=10.0) is None, "few steps are left"
    assert worth([[5.0, 5.0, 5.0, 5.0]], now, 2, steps_left=10**6, step_s=1.0, move_s=1.0) is None
    assert worth([[0.0] * 4], now, 2, steps_left=10**6, step_s=1.0, move_s=1.0) is None, "no rows at all"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 0, 1, 2), (1, 0, 2, 3), (0, 1, 2, 4), (0, 1, 2, 3, 0, 1, 2, 3)])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(ConfigError, match=r"parallel\.expert_order \[\]"):
        check_order(order, 4, 1, 2)


@pytest.mark.parametrize("setting", [{"parallel.place_experts": "on"}, {"parallel.expert_order": "[1, 0]"}])
def test_experts_of_other_models_stay(setting):
    with pytest.raises(ConfigError, match="stay where they are"):
        load_recipe(None, {"model.kind": "hf", "parallel.ep": "2"} | setting, environ={})


def runs(rank, data, folder, mesh, placed):
    """A run whose experts move, one whose experts stay, and perhaps one that begins where the first one ends up."""
    ceilings.measure, pace.WORTH_S = fixed_ceilings, math.inf  # this process is the test's own
    expert_hook.SETTLED, placement.LEAST = 3, 1e-9

    def run(name, **changes):
        loaded = tiny(Path(data), Path(folder), **RUN | mesh | {"run__name": name} | changes)
        stop = AfterStep(lambda step, _: signal.raise_signal(signal.SIGTERM) if step.number == STOP - 1 else None)
        stop.next_step = STOP - 1  # ranks agree on a stop with the step after
        assert train(loaded, hooks=[lambda *_: stop]).step == STOP

    run("moved", parallel__place_experts="on")
    restart = next(e for e in rows(Path(folder) / "moved" / "events.jsonl") if e["kind"] == "restart")
    order = restart["settings"]["parallel.expert_order"]
    run("stays")
    if placed:
        run("placed", parallel__expert_order=str(list(order)))
    return order


def check(data, folder, ranks, mesh, *, placed=True):
    orders = on_ranks(ranks, runs, str(data), str(folder), mesh, placed)
    assert all(order == orders[0] for order in orders)
    events = rows(folder / "moved" / "events.jsonl")
    (told,) = [e for e in events if e["kind"] == "experts"]
    assert told["step"] == 4
    assert 1 <= told["after"] < told["before"]
    assert told["moved"] > 0
    want, _ = last_state(folder / "stays")
    losses = {name: [row["loss"] for row in rows(folder / name / "metrics.jsonl") if "loss" in row]
              for name in ("moved", "stays", "placed")[: 2 + placed]}  # fmt: skip
    for name in ("moved", "placed")[: 1 + placed]:
        assert losses[name] == losses["stays"], name
        found, _ = last_state(folder / name)
        assert found.keys() == want.keys()
        for tensor, value in want.items():
            assert torch.equal(found[tensor], value), f"{name}: {tensor}"


@pytest.mark.dist
def test_a_run_whose_experts_move_is_the_one_in_which_they_stay(data, tmp_path):
    check(data, tmp_path, 2, {}, placed=False)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, {}),
        (4, {"parallel__dp_shard": 4}),
        (2, {"parallel__dispatch": "fp8", "precision__mode": "fp8_tile"}),
        (4, {"parallel__pp": 2, "train__micro_batch_size": 1, "model__num_layers": 4}),
    ],
    ids=["as typed", "shards", "8 bits", "stages"],
)
def test_also_in_shards_in_8_bits_and_in_stages(data, tmp_path, ranks, mesh):
    check(data, tmp_path, ranks, mesh)

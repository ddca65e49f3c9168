"""Experts move at a checkpoint to where their rows are balanced; the run is the one in which they stay, bit for bit."""

import itertools
import math
import signal
from collections import Counter
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
from tilewright.parallel.inside.experts.placement import balanced, by_rank, fullest, usual, worth
from tilewright.parallel.inside.experts.rank_experts import check_order
from tilewright.planner.machine import ceilings
from tilewright.training.hooks import expert_hook
from tilewright.training.hooks.step_hook import AfterStep
from tilewright.training.planning import pace
from tilewright.training.session import train

RUN = MIXED | {
    "train__steps": 5000, "train__eval_interval": 0, "train__sample_tokens": 0, "log__report": "false",
    "train__global_batch_size": 4, "checkpoint__interval": 4, "optim__schedule": "constant", "optim__clip_norm": 0,
    "model__num_experts": 8, "model__num_layers": 3, "parallel__ep": 2, "train__log_interval": 1, "optim__eps": 1e-4,
    "precision__mode": "fp32",
}  # fmt: skip
"""In FP32, where parts of a gradient are not rounded, and with an `eps` by which Adam makes nothing of a last bit."""
STOP = 6


@st.composite
def placements(draw):
    """Ranks, experts of each, redundant ones of each, and the rows of each expert: few get most, some perhaps none."""
    ranks, each = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    redundant = draw(st.integers(0, ranks * each - each))
    rows = st.one_of(st.just(0.0), st.floats(0, 1e3).map(lambda x: x**3))
    return ranks, each, redundant, draw(st.lists(rows, min_size=ranks * each, max_size=ranks * each))


@examples(50)
@given(placements())
def test_experts_with_most_rows_get_copies(case):
    """Each expert is held, by a rank once, as many by each; none has a copy that another one needs more. Where all
    ranks hold all experts they have as many rows."""
    ranks, each, redundant, load = case
    order = balanced(load, ranks, redundant)
    assert check_order(order, ranks * each, 1, ranks, redundant) == (order,)
    assert check_order(usual(ranks * each, ranks, redundant), ranks * each, 1, ranks, redundant)
    copies = [order.count(expert) for expert in range(ranks * each)]
    for few, many in itertools.product(range(len(load)), repeat=2):
        if copies[few] < ranks and copies[many] > 1:
            assert load[few] / copies[few] <= load[many] / (copies[many] - 1) * (1 + 1e-12)
    assert redundant < ranks * each - each or fullest(load, order, ranks) == pytest.approx(1.0)


def test_a_copy_halves_the_rows_of_the_fullest_expert():
    load = [13.0, 1.0, 1.0, 1.0]
    assert fullest(load, balanced(load, 2), 2) == 14 / 8
    assert fullest(load, balanced(load, 2, 1), 2) == pytest.approx(1.0)
    move = worth([load], (usual(4, 2, 1),), 2, steps_left=100, step_s=1.0, move_s=1.0)
    assert move is None, "the first expert has a copy there before any rows are counted"
    move = worth([load[::-1]], ((0, 1, 2, 0, 2, 3),), 2, steps_left=100, step_s=1.0, move_s=1.0)
    assert move is not None
    assert sum(3 in held for held in by_rank(move.orders[0], 2)) == 2


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


@pytest.mark.parametrize(
    ("order", "redundant"),
    [((0, 1, 2, 3), 1), ((0, 1, 1, 0, 2, 3), 1), ((0, 2, 1, 0, 2, 3), 1), ((0, 1, 2, 0, 1, 2), 1)],
    ids=["no copies", "twice", "not in their order", "one held by none"],
)
def test_an_order_with_copies_that_is_none_is_refused(order, redundant):
    with pytest.raises(ConfigError, match=r"parallel\.redundant_experts = 1 for each of 2 processes"):
        check_order(order, 4, 1, 2, redundant)


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
    run("copied", parallel__place_experts="on", parallel__redundant_experts=1)
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
    if "precision__mode" not in mesh:  # 8 bits round other rows together
        check_copied(folder, want)
    losses = {name: [row["loss"] for row in rows(folder / name / "metrics.jsonl") if "loss" in row]
              for name in ("moved", "stays", "placed")[: 2 + placed]}  # fmt: skip
    for name in ("moved", "placed")[: 1 + placed]:
        assert losses[name] == losses["stays"], name
        found, _ = last_state(folder / name)
        assert found.keys() == want.keys()
        for tensor, value in want.items():
            assert torch.equal(found[tensor], value), f"{name}: {tensor}"


def check_copied(folder, want):
    """Experts with most rows have a copy on another rank, of which a checkpoint has one: the run is the same within
    sums in another order."""
    (restart,) = [e for e in rows(folder / "copied" / "events.jsonl") if e["kind"] == "restart"]
    order = restart["settings"]["parallel.expert_order"]
    for one in (order[start : start + 10] for start in range(0, len(order), 10)):
        assert sorted(Counter(one).values()) == [1] * 6 + [2] * 2, "two of eight are on both ranks"
    found, _ = last_state(folder / "copied")
    assert found.keys() == want.keys()
    for name, value in want.items():
        if name.startswith("model."):
            off = (found[name].float() - value.float()).abs().max()
            assert off < 2e-6, f"{name} is off by {off:.2g}"
    ours, theirs = ([row["loss"] for row in rows(folder / name / "metrics.jsonl") if "loss" in row]
                    for name in ("copied", "stays"))  # fmt: skip
    assert ours == pytest.approx(theirs, rel=1e-6)


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

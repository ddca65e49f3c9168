"""The fitted cost model: what it says of a stage, on ranks of other speeds, with noise and outliers."""

import json
import math
import random

import pytest

from tilewright.parallel.pipeline.balance.cost_model import CostModel, StageWork
from tilewright.parallel.pipeline.balance.fit_costs import CostFit, StageSeconds

KINDS = ("dense", "moe")
PRIOR = CostModel(KINDS, (1.0, 1e-3, 3.0, 1e-3, 0.1, 1.0, 0.0))
LAYERS = ({"dense": 2, "moe": 1}, {"dense": 1, "moe": 2}, {"moe": 3}, {"dense": 3})


def truth(draw: random.Random) -> CostModel:
    """Seconds of a machine."""
    sizes = (2e-6, 1e-9, 5e-6, 1e-9, 1e-6, 8e-6, 2e-3)
    return CostModel(KINDS, tuple(size * draw.uniform(0.5, 2.0) for size in sizes))


def works(draw: random.Random, of_stages=LAYERS) -> list[list[StageWork]]:
    """By stage, of each micro-batch of a step."""
    steps = []
    for _ in range(8):
        lengths = [max(16, min(2000, int(draw.lognormvariate(5, 1)))) for _ in range(8)]
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        steps.append([StageWork(layers, tokens, pairs, i == 0, i == 3) for i, layers in enumerate(of_stages)])
    return steps


def step(model: CostModel, speeds, draw: random.Random, noise: float, layers=LAYERS) -> list[StageSeconds]:
    """What a step takes; one pass in thirty takes several times as long."""
    found = []
    for of_stages in works(draw, layers):
        for rank, work in enumerate(of_stages):
            seconds = model.seconds(work) / speeds[rank] * math.exp(draw.gauss(0, noise))
            found.append(StageSeconds(work, rank, seconds * (draw.uniform(2, 5) if draw.random() < noise / 2 else 1)))
    return found


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (1, 1, 0.8, 1), (0.8, 1, 1, 1), (1, 1, 1, 0.5)])
@pytest.mark.parametrize("seed", range(3))
def test_after_twenty_steps_it_is_within_a_tenth_for_each_stage(seed, speeds):
    draw = random.Random(seed)
    model, fit = truth(draw), CostFit(PRIOR, 4)
    for _ in range(20):
        fit.learn(step(model, speeds, draw, noise=0.06))
    worst = max(
        (abs(fit.model.seconds(work) / fit.speeds[rank] / (model.seconds(work) / speeds[rank]) - 1), rank)
        for of_stages in works(draw)
        for rank, work in enumerate(of_stages)
    )
    assert worst[0] <= 0.1, worst
    assert all(c >= 0 for c in fit.model.coefficients)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_slow_rank_is_found_where_others_have_such_layers(rank):
    """Of the two without an end: a rank that alone has one may be slow or its end dear, and nothing tells."""
    draw = random.Random(rank)
    speeds = [1.0] * 4
    speeds[rank] = 0.8
    model, fit = truth(draw), CostFit(PRIOR, 4)
    for _ in range(20):
        fit.learn(step(model, speeds, draw, noise=0.03, layers=[{"dense": 2, "moe": 1}] * 4))
    other = 3 - rank
    assert fit.speeds[rank] / fit.speeds[other] == pytest.approx(0.8, rel=0.04)


def test_it_follows_a_change_of_the_machine():
    draw = random.Random(5)
    model, fit = truth(draw), CostFit(PRIOR, 4)
    for speeds in [(1, 1, 1, 1)] * 10 + [(1, 0.5, 1, 1)] * 15:
        fit.learn(step(model, speeds, draw, noise=0.02))
    assert fit.speeds[1] / max(fit.speeds) == pytest.approx(0.5, rel=0.1)


def test_balanced_micro_batches_do_not_lead_it_astray():
    """Where all micro-batches are alike, one unknown is seen: the others stay near the prior, and none explodes."""
    fit = CostFit(CostModel(("dense",), (1.0, 1e-3, 0.0, 0.0, 0.0)), 1)
    work = StageWork({"dense": 4}, 1000, 400_000, True, True)
    for _ in range(20):
        fit.learn([StageSeconds(work, 0, 0.5)] * 8)
    assert fit.model.seconds(work) == pytest.approx(0.5, rel=0.01)
    double = StageWork({"dense": 4}, 2000, 800_000, True, True)
    assert 0.5 <= fit.model.seconds(double) <= 1.01


def test_it_goes_on_from_its_state_bit_by_bit():
    draw = random.Random(7)
    model = truth(draw)
    steps = [step(model, (1, 1, 0.8, 1), draw, noise=0.05) for _ in range(6)]
    whole, first = CostFit(PRIOR, 4), CostFit(PRIOR, 4)
    for one in steps:
        whole.learn(one)
    for one in steps[:3]:
        first.learn(one)
    second = CostFit(PRIOR, 4)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for one in steps[3:]:
        second.learn(one)
    assert second.state_dict() == whole.state_dict()


def test_a_state_of_other_ranks_keeps_the_model_and_not_their_speeds():
    draw = random.Random(8)
    fit, fewer = CostFit(PRIOR, 4), CostFit(PRIOR, 2)
    fit.learn(step(truth(draw), (1, 1, 0.8, 1), draw, noise=0.0))
    fewer.load_state_dict(fit.state_dict())
    assert fewer.model == fit.model
    assert fewer.speeds == [1.0, 1.0]


def test_a_step_without_seconds_teaches_nothing():
    fit = CostFit(PRIOR, 4)
    fit.learn([StageSeconds(StageWork({}, 0, 0), 0, 0.0)])
    assert fit.steps == 0
    assert fit.model == PRIOR


def test_after_a_restart_the_first_step_is_held_against_the_model_that_was_kept():
    """The error that the report shows is of what was said before the step, also where another process had said it."""
    draw, speeds = random.Random(7), (1, 1, 0.8, 1)
    model, straight = truth(draw), CostFit(PRIOR, 4)
    for _ in range(10):
        straight.learn(step(model, speeds, draw, noise=0.06))
    again = CostFit(PRIOR, 4)
    again.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert math.isnan(again.error), "nothing was said yet in this process"
    later = step(model, speeds, draw, noise=0.06)
    for fit in (straight, again):
        fit.learn(later)
    assert again.error == pytest.approx(straight.error, rel=1e-12)
    assert again.error < 0.2

"""Layers over stages: against every split there is."""

import itertools
import random

import pytest

from tilewright.parallel.pipeline.balance.resplit import SplitCosts, best_split, worth
from tilewright.parallel.pipeline.split import Pipeline


def every_split(layers: int, stages: int):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, layers)))


def drawn(seed: int) -> tuple[SplitCosts, tuple[int, ...]]:
    draw = random.Random(seed)
    pipeline = draw.choice([Pipeline(2), Pipeline(4), Pipeline(2, "zbv", 2), Pipeline(2, "interleaved", 2)])
    layers = draw.randint(pipeline.num_stages, 11)
    costs = SplitCosts(
        [draw.choice([1.0, 1.0, 2.5]) for _ in range(layers)],
        [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)],
        [draw.choice([1.0, 0.8, 0.5]) for _ in range(pipeline.pp)],
        first=draw.choice([0.0, 0.5]),
        last=draw.choice([0.0, 2.0]),
        most=draw.choice([None, layers - pipeline.pp + 1]),
    )
    return costs, tuple(map(len, pipeline.split(layers)))


@pytest.mark.parametrize("seed", range(60))
def test_no_split_is_much_better_and_none_is_worse_than_the_one_there_was(seed):
    """Moves of one layer end at the best split but for the last layer that goes nowhere."""
    costs, now = drawn(seed)
    found = best_split(costs, now)
    took = max(costs.rank_seconds(found))
    best = min(
        max(costs.rank_seconds(split)) for split in every_split(len(costs.layers), len(now)) if costs._fits(split)
    )
    assert sum(found) == len(costs.layers)
    assert min(found) >= 1
    assert took <= max(costs.rank_seconds(now))
    assert took <= best + max(costs.layers) / min(costs.speeds), (found, took, best)


@pytest.mark.parametrize("seed", range(10))
def test_with_equal_layers_it_is_the_best_there_is(seed):
    draw = random.Random(seed)
    speeds = [draw.choice([1.0, 0.8, 0.5]) for _ in range(4)]
    costs = SplitCosts([1.0] * 12, (0, 1, 2, 3), speeds)
    best = min(max(costs.rank_seconds(split)) for split in every_split(12, 4))
    assert max(costs.rank_seconds(best_split(costs, (3, 3, 3, 3)))) == pytest.approx(best)


def test_a_split_that_is_even_stays():
    costs = SplitCosts([1.0] * 8, (0, 1), (1.0, 1.0))
    assert best_split(costs, (4, 4)) == (4, 4)
    assert worth(costs, (4, 4), steps_left=10**6, step_s=1.0, move_s=0.0) is None


def test_a_move_has_to_be_worth_what_it_takes():
    costs = SplitCosts([1.0] * 16, (0, 1), (1.0, 0.6))
    move = worth(costs, (8, 8), steps_left=1000, step_s=1.0, move_s=60.0)
    assert move.split == (10, 6)
    assert move.gain == pytest.approx(0.25)
    assert worth(costs, (8, 8), steps_left=100, step_s=1.0, move_s=60.0) is None


def test_no_rank_gets_more_layers_than_it_has_memory_for():
    costs = SplitCosts([1.0] * 16, (0, 1), (1.0, 0.2), most=9)
    assert best_split(costs, (8, 8)) == (9, 7)

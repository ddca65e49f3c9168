"""Layers over stages: against every split there is."""

import itertools
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.parallel.pipeline.balance.resplit import SplitCosts, best_split, common_split, rows_s, worth
from tilewright.parallel.pipeline.bottleneck import Cut, PartWorker
from tilewright.parallel.pipeline.stage_split import Pipeline


def every_split(layers: int, stages: int):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, layers)))


@st.composite
def drawn(draw, alike: bool | None = None) -> SplitCosts:
    pipeline = draw(
        st.sampled_from(
            [Pipeline(2), Pipeline(3), Pipeline(4), Pipeline(2, "zbv", 2), Pipeline(2, "interleaved", 2),
             Pipeline(3, "zbv", 2), Pipeline(2, "interleaved", 3), Pipeline(3, "interleaved", 2)]
        )
    )  # fmt: skip
    layers = draw(st.integers(pipeline.num_stages, 9))
    mosts = [None, layers - pipeline.num_stages + pipeline.virtual, -(-layers // pipeline.pp) + 1]
    of_layers = [1.0] * layers if alike else draw(st.lists(COSTS, min_size=layers, max_size=layers))
    return SplitCosts(
        of_layers,
        [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)],
        draw(st.lists(st.sampled_from([1.0, 0.8, 0.5]), min_size=pipeline.pp, max_size=pipeline.pp)),
        first=draw(st.sampled_from([0.0, 0.5])),
        last=draw(st.sampled_from([0.0, 0.7, 4.0])),
        most=draw(st.sampled_from(mosts)),
    )


COSTS = st.sampled_from([0.0, 0.3, 1.0, 1.0, 2.5, 7.0])


def fitting(costs: SplitCosts):
    """Every split for which ranks have memory."""
    for split in every_split(len(costs.layers), len(costs.rank_of)):
        if costs.most is None or max(costs.held(split)) <= costs.most:
            yield split


@given(drawn())
def test_no_split_is_much_better_and_none_better_with_one_stage_per_rank(costs):
    found = best_split(costs)
    took = costs.slowest_s(found)
    best = min(map(costs.slowest_s, fitting(costs)))
    assert found in set(fitting(costs))
    if len(set(costs.rank_of)) == len(costs.rank_of):
        assert took <= best * (1 + 1e-8), (found, took, best)
    else:
        assert took <= best + max(costs.layers) / min(costs.speeds), (found, took, best)


@given(drawn(alike=True))
def test_with_equal_layers_it_is_the_best_there_is(costs):
    assert costs.slowest_s(best_split(costs)) <= min(map(costs.slowest_s, fitting(costs))) * (1 + 1e-9)


@given(st.data())
def test_a_list_is_cut_as_well_as_by_any_cut(data):
    """Parts of any least and greatest length, on workers with other work of their own."""
    costs = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=9))
    sizes = st.tuples(st.integers(0, 2), st.sampled_from([2, 3, 9])).filter(lambda pair: pair[0] <= pair[1])
    workers = [
        PartWorker(
            data.draw(st.sampled_from([1.0, 0.8, 0.4])), data.draw(st.sampled_from([0.0, 3.0])), *data.draw(sizes)
        )
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    cut = Cut(costs, workers)
    every = [
        tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), len(workers) - 1)
    ]
    may = [
        counts for counts in every
        if all(one.least <= count <= one.most for one, count in zip(workers, counts, strict=True))
    ]  # fmt: skip
    found = cut.best()
    if not may:
        assert found is None
        return
    assert found in may
    assert cut.seconds(found) <= min(map(cut.seconds, may)) * (1 + 1e-8)


@pytest.mark.parametrize("pipeline", [Pipeline(64), Pipeline(64, "interleaved", 2), Pipeline(64, "zbv", 2)])
def test_a_model_of_256_layers_on_64_ranks_is_split_in_seconds(pipeline):
    draw, began = random.Random(0), time.process_time()
    rank_of = [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)]
    speeds = [draw.choice([1.0, 0.8]) for _ in range(64)]
    for layers in ([1.0] * 256, [draw.choice([1.0, 1.3, 2.0]) for _ in range(256)]):
        costs = SplitCosts(layers, rank_of, speeds, last=2.0)
        found = best_split(costs)
        assert costs.slowest_s(found) <= sum(layers) / sum(speeds) + max(layers) / min(speeds)
    assert time.process_time() - began < 5.0


def test_a_split_that_is_even_stays():
    costs = SplitCosts([1.0] * 8, (0, 1), (1.0, 1.0))
    assert best_split(costs) == (4, 4)
    assert worth([costs], (4, 4), by_speed=True, steps_left=10**6, step_s=1.0, move_s=0.0) is None


def test_a_move_has_to_be_worth_what_it_takes():
    costs = SplitCosts([1.0] * 16, (0, 1), (1.0, 0.6))
    move = worth([costs], (8, 8), by_speed=True, steps_left=1000, step_s=1.0, move_s=60.0)
    assert move.split == (10, 6)
    assert move.gain == pytest.approx(0.25)
    assert worth([costs], (8, 8), by_speed=True, steps_left=100, step_s=1.0, move_s=60.0) is None


def test_layers_that_take_no_time_stay():
    costs = SplitCosts([0.0] * 4, (0, 1), (1.0, 0.5))
    assert worth([costs], (2, 2), by_speed=True, steps_left=10**6, step_s=1.0, move_s=0.0) is None


def test_no_rank_gets_more_layers_than_it_has_memory_for():
    costs = SplitCosts([1.0] * 16, (0, 1), (1.0, 0.2), most=9)
    assert best_split(costs) == (9, 7)


def test_layers_do_not_leave_the_slow_rank_of_one_row_where_documents_do():
    """Its row gets less: 3.8 micro-batches in the time of 8 layers. Nine layers on another rank of all rows are 3.6."""
    rows = [SplitCosts([1.0] * 64, range(8), (1.0,) * 8)] * 3
    rows.append(SplitCosts([1.0] * 64, range(8), (1.0, 0.8) * 4))
    even = (8,) * 8
    assert common_split(rows, even, by_speed=True) == even
    assert worth(rows, even, by_speed=True, steps_left=10**6, step_s=1.0, move_s=0.0) is None
    assert rows_s(rows, even, by_speed=True) == pytest.approx(8 * 4 / 3.8)
    assert rows_s(rows, even, by_speed=False) == pytest.approx(10.0)
    assert max(common_split(rows, even, by_speed=False)) == 9, "a step waits for the slow row"


@given(drawn(), st.integers(1, 4), st.booleans(), st.data())
def test_the_split_of_all_rows_is_no_worse_than_any_that_is_at_hand(costs, count, by_speed, data):
    speeds = st.lists(st.sampled_from([1.0, 0.8, 0.5]), min_size=len(costs.speeds), max_size=len(costs.speeds))
    rows = [replace(costs, speeds=data.draw(speeds)) for _ in range(count)]
    now = next(fitting(costs))
    found = common_split(rows, now, by_speed=by_speed)
    assert costs.most is None or max(costs.held(found)) <= costs.most
    for other in (now, *map(best_split, rows)):
        assert rows_s(rows, found, by_speed=by_speed) <= rows_s(rows, other, by_speed=by_speed)

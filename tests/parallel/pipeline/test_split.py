"""Which layers are where, and how many micro-batches a schedule takes: as torch's own schedules say."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError, HardwareError
from tilewright.parallel.launch import PIPELINES
from tilewright.parallel.pipeline.stage_split import Pipeline

SCHEDULES = st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3),
                             ("interleaved_zero_bubble", 2), ("interleaved_deferred", 3), ("zbv", 2),
                             ("dualpipe_v", 2)])  # fmt: skip


@given(SCHEDULES, st.integers(2, 9), st.integers(1, 70))
def test_each_layer_is_in_one_stage_and_no_stage_is_without(schedule, pp, num_layers):
    pipeline = Pipeline(pp, *schedule)
    assert sorted(stage for rank in range(pp) for stage in pipeline.stages_of(rank)) == list(range(pipeline.num_stages))
    if num_layers < pipeline.num_stages:
        with pytest.raises(ConfigError, match="Fewer layers than stages") as caught:
            pipeline.split(num_layers)
        assert "--parallel." in caught.value.problems[0].try_
        return
    ranges = pipeline.split(num_layers)
    assert [layer for of_stage in ranges for layer in of_stage] == list(range(num_layers))
    sizes = [len(of_stage) for of_stage in ranges]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@given(SCHEDULES, st.integers(2, 4), st.lists(st.integers(0, 5), max_size=14), st.integers(12, 40))
def test_a_split_by_hand_is_taken_as_it_is_or_refused_with_one_that_is_not(schedule, pp, counts, num_layers):
    pipeline = Pipeline(pp, *schedule, layers=tuple(counts))
    if not counts or (len(counts) == pipeline.num_stages and min(counts) > 0 and sum(counts) == num_layers):
        ranges = pipeline.split(num_layers)
        assert [layer for of_stage in ranges for layer in of_stage] == list(range(num_layers))
        assert not counts or [len(of_stage) for of_stage in ranges] == counts
        return
    with pytest.raises(ConfigError, match="not one of this model") as caught:
        pipeline.split(num_layers)
    given = caught.value.problems[0].try_.split("[")[1].split("]")[0]
    Pipeline(pp, *schedule, layers=tuple(map(int, given.split(",")))).split(num_layers)


def most_work(pipeline, costs, ends, counts):
    """Of a rank, with so many layers per stage."""
    bounds = list(itertools.accumulate(counts, initial=0))
    work = [0] * pipeline.pp
    for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
        work[pipeline.rank_of(stage)] += sum(costs[begin:end])
    work[pipeline.rank_of(0)] += ends[0]
    work[pipeline.rank_of(pipeline.num_stages - 1)] += ends[1]
    return max(work)


ENDS = st.tuples(st.sampled_from([0, 3]), st.sampled_from([0, 5, 60]))


@given(SCHEDULES, st.integers(2, 4), st.lists(st.integers(0, 30), min_size=12, max_size=12), ENDS, st.integers(2, 11))
def test_the_rank_with_most_work_has_little(schedule, pp, costs, ends, layers):
    """With one stage per rank as little as by any split; with several at most a layer more."""
    pipeline = Pipeline(pp, *schedule)
    layers = max(layers, pipeline.num_stages)
    costs = costs[:layers]
    ranges = pipeline.split(layers, costs, ends)
    assert [layer for of_stage in ranges for layer in of_stage] == list(range(layers))
    assert min(map(len, ranges)) >= 1
    if not any(costs):
        assert ranges == pipeline.split(layers)
        return
    found = most_work(pipeline, costs, ends, map(len, ranges))
    every = itertools.combinations(range(1, layers), pipeline.num_stages - 1)
    best = min(
        most_work(pipeline, costs, ends, [end - begin for begin, end in itertools.pairwise((0, *cuts, layers))])
        for cuts in every
    )
    assert found <= best + (0 if pipeline.virtual == 1 else max(costs))
    assert found <= most_work(pipeline, costs, ends, map(len, pipeline.split(layers)))
    again = pipeline.split(layers, [7 * cost for cost in costs], (7 * ends[0], 7 * ends[1]))
    assert most_work(pipeline, costs, ends, map(len, again)) == found, "costs have no unit"


@given(SCHEDULES, st.integers(2, 9), st.integers(1, 70), st.integers(0, 10**15))
def test_layers_that_cost_alike_are_dealt_out_by_their_number(schedule, pp, layers, cost):
    pipeline = Pipeline(pp, *schedule)
    layers = max(layers, pipeline.num_stages)
    assert pipeline.split(layers, (cost,) * layers) == pipeline.split(layers)


@given(SCHEDULES, st.integers(2, 4), st.integers(12, 40))
def test_a_drawn_split_is_taken(schedule, pp, num_layers):
    even = [len(of_stage) for of_stage in Pipeline(pp, *schedule).split(num_layers)]
    even[0], even[-1] = even[0] + even[-1] - 1, 1
    assert [len(one) for one in Pipeline(pp, *schedule, layers=tuple(even)).split(num_layers)] == even


@given(SCHEDULES, st.integers(2, 9), st.integers(0, 60))
def test_a_count_that_is_refused_comes_with_one_that_is_not(schedule, pp, count):
    pipeline = Pipeline(pp, *schedule)
    if pipeline.takes(count):
        pipeline.check_count(count)
        return
    with pytest.raises(ConfigError, match="does not take") as caught:
        pipeline.check_count(count, rows=2, ranks=3)
    (problem,) = caught.value.problems
    rows = int(problem.try_.split("--train.global_batch_size ")[1].split(",")[0])
    assert pipeline.takes(rows // 6)
    assert rows // 6 > count


@given(SCHEDULES, st.integers(1, 9))
def test_turned_ranks_hold_the_same_stages_from_the_other_end(schedule, pp):
    there, turned = Pipeline(pp, *schedule), Pipeline(pp, *schedule, reverse=True)
    for rank in range(pp):
        assert turned.stages_of(rank) == there.stages_of(pp - 1 - rank)
        assert {turned.rank_of(stage) for stage in turned.stages_of(rank)} == {rank}


@pytest.mark.parametrize("version", ["2.12.1", "1.13.0+cu118", "2.9.0"])
def test_an_older_torch_is_refused_by_name(version):
    with pytest.raises(HardwareError, match="newer torch") as caught:
        PIPELINES.check(version)
    assert version in str(caught.value)


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.0.dev20261101", "3.0"])
def test_a_newer_one_is_taken(version):
    PIPELINES.check(version)

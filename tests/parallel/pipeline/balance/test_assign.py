"""Documents over micro-batches: none lost, none twice, within memory, near the least time that is possible."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.parallel.pipeline.assignment import Room, check_assignment
from tilewright.parallel.pipeline.balance.assign import RowShape, WeighedDocuments, assign, choose, in_order
from tilewright.parallel.pipeline.balance.balancer import as_arrays
from tilewright.parallel.pipeline.stage_split import Pipeline

PIPELINES = (Pipeline(1), Pipeline(4), Pipeline(3, "gpipe"), Pipeline(3, "interleaved", 2), Pipeline(2, "zbv", 2))
PIPELINES += (
    Pipeline(2, "dualpipe_v", 2),
    Pipeline(2, "interleaved_zero_bubble", 3),
    Pipeline(2, "interleaved_deferred", 2),
)


def of(lengths) -> WeighedDocuments:
    return WeighedDocuments(lengths, [length + length * length / 60 for length in lengths])


@examples(80)
@given(
    lengths=st.lists(st.integers(1, 99), min_size=1, max_size=60),
    speeds=st.lists(st.sampled_from([1.0, 0.8, 0.3]), min_size=1, max_size=4),
    tokens=st.integers(99, 400),
    pipeline=st.sampled_from(PIPELINES),
    now=st.integers(0, 12),
    each_s=st.sampled_from([0.0, 50.0]),
)
def test_each_document_is_read_once_whatever_there_is(lengths, speeds, tokens, pipeline, now, each_s):
    import numpy as np

    room, row = Room(len(speeds), tokens, pipeline.takes), RowShape.of(pipeline)
    places = choose(of(lengths), speeds, room, row, each_s=each_s, now=now)
    check_assignment(as_arrays(places), np.array(lengths), room)
    assert places == choose(of(lengths), list(speeds), room, row, each_s=each_s, now=now)


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 99), min_size=4, max_size=80),
    speeds=st.lists(st.sampled_from([1.0, 0.8]), min_size=1, max_size=3),
    count=st.integers(1, 4),
)
def test_the_slowest_rank_is_near_the_best(lengths, speeds, count):
    """List scheduling ends within one document of the mean, on ranks and in micro-batches."""
    documents = of(lengths)
    places = assign(documents, speeds, count, 10**6)
    one = max(documents.costs) / min(speeds)
    through = [sum(documents.costs[i] for part in rank for i in part) for rank in places]
    assert max(c / s for c, s in zip(through, speeds, strict=True)) <= documents.total / sum(speeds) + one + 1e-9
    for of_rank, rank in zip(through, places, strict=True):
        loads = [sum(documents.costs[i] for i in part) for part in rank]
        assert max(loads) <= of_rank / count + max(documents.costs) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_on_documents_of_a_corpus_micro_batches_are_within_a_hundredth(seed):
    draw = random.Random(seed)
    documents = of([min(8192, max(64, int(draw.lognormvariate(6.6, 1.1)))) for _ in range(1024)])
    places = assign(documents, [1.0] * 4, 8, 10**6)
    loads = [sum(documents.costs[i] for i in part) for rank in places for part in rank]
    assert max(loads) <= 1.01 * sum(loads) / len(loads) or max(loads) == max(documents.costs), loads


def test_a_slow_rank_gets_less_in_proportion():
    documents = of([20] * 380)
    places = assign(documents, [1.0, 1.0, 0.8, 1.0], 5, 10**6)
    assert [sum(map(len, rank)) for rank in places] == [100, 100, 80, 100]


@pytest.mark.parametrize("count", range(1, 9))
def test_the_cheapest_pass_first_and_last(count):
    costs = [float(draw) for draw in random.Random(count).sample(range(100), count)]
    found = in_order(costs, costs)
    top = found.index(max(costs))
    assert sorted(found) == sorted(costs)
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


def test_the_number_of_micro_batches_follows_what_each_costs_and_stays_where_little_is_to_be_had():
    documents, room, row = of([50] * 256), Room(1, 10**6), RowShape(4)
    many = len(choose(documents, [1.0], room, row, each_s=1.0)[0])
    few = len(choose(documents, [1.0], room, row, each_s=500.0)[0])
    assert few < many <= row.most
    near = few + 1
    assert len(choose(documents, [1.0], room, row, each_s=500.0, now=near)[0]) == near
    assert len(choose(documents, [1.0], room, row, each_s=500.0, now=many)[0]) == few


def test_memory_decides_how_few_there_are():
    documents = of([50] * 64)
    assert len(choose(documents, [1.0], Room(1, 100), RowShape(4), each_s=1e9)[0]) == 32

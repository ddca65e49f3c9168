"""A step on paper: closed formulas of schedules, and causes of idle time that add up."""

import random
from dataclasses import replace

import pytest

from tilewright.parallel.pipeline.balance.replay import Pass, busy_s, idle_time, replayed, span_s


def gpipe(ranks: int, count: int, seconds=lambda *_: 1.0) -> list[list[Pass]]:
    """All forward passes, then all backward ones; begun one after the other on paper."""
    row = [
        [Pass("forward", rank, i, 0.0, seconds(rank, i)) for i in range(count)]
        + [Pass("backward", rank, i, 0.0, 2 * seconds(rank, i)) for i in range(count)]
        for rank in range(ranks)
    ]
    return replayed(row)


def one_f_one_b(ranks: int, count: int, seconds=lambda *_: 1.0) -> list[list[Pass]]:
    row = []
    for rank in range(ranks):
        warm = min(count, ranks - rank)
        order = [("forward", i) for i in range(warm)]
        for i in range(count):
            order.append(("backward", i))
            order += [("forward", warm + i)] if warm + i < count else []
        times = {"forward": 1, "backward": 2}
        row.append([Pass(kind, rank, i, 0.0, times[kind] * seconds(rank, i)) for kind, i in order])
    return replayed(row)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 2), (4, 16), (8, 8)])
def test_even_passes_meet_the_formula(make, ranks, count):
    found = idle_time([make(ranks, count)])
    assert found.share == pytest.approx((ranks - 1) / (count + ranks - 1))
    assert found.causes["filling and draining"] == pytest.approx(found.share)


@pytest.mark.parametrize("seed", range(20))
def test_causes_add_up_to_the_idle_share(seed):
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.randint(1, 3)):
        row = one_f_one_b(draw.randint(1, 4), draw.randint(4, 9), lambda *_: draw.uniform(0.1, 3.0))
        rows.append([[replace(one, begin_s=one.begin_s * 1.2 + 0.5) for one in of_rank] for of_rank in row])
    found = idle_time(rows)
    assert sum(found.causes.values()) == pytest.approx(found.share)
    assert found.causes["messages and other"] > 0
    span = max(map(span_s, rows))
    assert found.share == pytest.approx(1 - sum(map(busy_s, rows)) / (span * sum(map(len, rows))))


def test_each_cause_is_seen_where_it_is():
    even = gpipe(4, 8)
    assert idle_time([gpipe(4, 8, lambda rank, _: 2.0 if rank == 2 else 1.0)]).causes["unequal stages"] > 0.2
    assert idle_time([gpipe(4, 8, lambda _, i: 5.0 if i == 3 else 1.0)]).causes["unequal micro-batches"] > 0.1
    assert idle_time([even, gpipe(4, 8, lambda *_: 2.0)]).causes["unequal rows"] == pytest.approx(
        0.25 * 8 / 11 + 0.25 * 3 / 11
    )
    late = [[replace(one, begin_s=2 * one.begin_s) for one in of_rank] for of_rank in even]
    assert idle_time([late]).causes["messages and other"] > 0.3


def test_weight_gradients_that_wait_follow_their_input_gradients():
    row = [
        [Pass("forward", 0, 0, 0, 1), Pass("backward of inputs", 0, 0, 0, 1), Pass("backward of weights", 0, 0, 0, 1)]
    ]
    assert [one.begin_s for one in replayed(row)[0]] == [0, 1, 2]


def test_passes_that_wait_for_each_other_are_an_error_and_not_a_hang():
    row = [[Pass("backward", 0, 0, 0, 1), Pass("forward", 0, 0, 0, 1)]]
    with pytest.raises(ValueError, match="wait for each other"):
        replayed(row)

"""Stages whose matrices are cut over ranks, and what is left in shards: gradients are those of one process, whatever
the schedule, the model, and the shapes of micro-batches. Weight gradients wait where the schedule lets them."""

import pytest

from tests.parallel.pipeline.test_parity import SCHEDULES, _cases, _check
from tests.ranks import on_ranks
from tilewright.parallel.pipeline.stage_split import Pipeline

pytestmark = pytest.mark.dist


def _cut(name, kind, shards=1, copies=1, recompute="none", slices=True):
    return SCHEDULES[name], kind, shards, copies, recompute, 2, slices


FEW = [
    _cut("zbv", "tied_even", recompute="full"),
    _cut("interleaved_deferred", "moe_even"),
    _cut("1f1b", "own_even"),
]
MORE = [
    _cut("1f1b", "gqa_even"),
    _cut("interleaved", "mla_even", slices=False),
    _cut("gpipe", "tied_even", slices=False),
    _cut("interleaved_zero_bubble", "gqa", recompute="full"),
    _cut("dualpipe_v", "mla_even", recompute="selective"),
    _cut("1f1b", "tied_even"),
    _cut("zbv", "moe_even", slices=False),
    _cut("1f1b", "deepseek", recompute="full"),
    _cut("zbv", "own_even", recompute="selective", slices=False),
]


def test_on_four_ranks():
    _check(FEW, on_ranks(4, _cases, FEW))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_on_four_ranks():
    _check(MORE, on_ranks(4, _cases, MORE, seconds=500))


@pytest.mark.slow
def test_with_shards_on_eight_ranks():
    cases = [_cut("1f1b", "tied_even", 2)]
    _check(cases, on_ranks(8, _cases, cases))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_schedule_with_shards_on_eight_ranks():
    kinds = ("gqa_even", "mla_even", "moe_even", "tied_even")
    cases = [
        _cut(name, kinds[place % len(kinds)], 2, recompute=("full", "none")[place % 2], slices=place != 2)
        for place, name in enumerate(SCHEDULES)
    ]
    _check(cases, on_ranks(8, _cases, cases, seconds=580))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_with_shards_on_eight_ranks(name):
    cases = [_cut(name, kind, 2, recompute="full") for kind in ("gqa_even", "tied_even", "mla_even", "moe_even")]
    cases += [_cut(name, "gqa_even", 2, slices=False), _cut(name, "tied_even", 1, 2)]
    _check(cases, on_ranks(8, _cases, cases, seconds=1500))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_stages_of_two_parts():
    cases = [(Pipeline(4), "tied_even", 1, 1, "none", 2), (Pipeline(4, "interleaved", 2), "moe_even", 1, 1, "none", 2)]
    _check(cases, on_ranks(8, _cases, cases, seconds=500))

"""Stages whose experts are spread over ranks: gradients are those of one process, whatever the schedule, the model, and
the shapes of micro-batches. A stage without experts takes part in nothing that others exchange."""

import pytest

from tests.parallel.pipeline import test_hf_parity as hf
from tests.parallel.pipeline.test_parity import SCHEDULES, _cases, _check
from tests.ranks import on_ranks
from tilewright.parallel.pipeline.stage_split import Pipeline

pytestmark = pytest.mark.dist


def _spread(name, kind, shards=2, copies=1, recompute="none", tp=1, ep=2):
    return SCHEDULES[name], kind, shards, copies, recompute, tp, True, ep


@pytest.mark.timeout(600)
def test_on_four_ranks():
    """Of DeepSeek-V3 the first stage is dense."""
    cases = [_spread("zbv", "deepseek", recompute="full"), _spread("1f1b", "deepseek_v3")]
    results = on_ranks(4, _cases, cases)
    _check(cases[:1], [found[:1] for found in results])
    hf._check(cases[1:], [found[1:] for found in results])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_schedule():
    cases = [_spread(name, kind, recompute="full") for name in SCHEDULES for kind in ("gqa_moe", "deepseek")]
    cases += [_spread(name, "moe_even", 1, tp=2) for name in ("1f1b", "zbv")]
    _check(cases, on_ranks(4, _cases, cases, seconds=800))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_schedule_of_hugging_face():
    cases = [_spread(name, "qwen3_moe") for name in SCHEDULES]
    hf._check(cases, on_ranks(4, _cases, cases, seconds=800))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_eight_ranks():
    cases = [_spread("1f1b", "gqa_moe", 4), _spread("zbv", "deepseek", 2, 2)]
    cases += [_spread("1f1b", "moe_even", 2, tp=2, ep=4)]
    cases += [(Pipeline(4), "deepseek", 2, 1, "none", 1, True, 2)]
    _check(cases, on_ranks(8, _cases, cases, seconds=800))

"""Gradients of stages are those of one process, whatever the schedule, the model, and the shapes of micro-batches."""

import pytest

from tests.models.shapes import SHAPES
from tests.parallel.pipeline.ragged import TOLERANCE, decoder, worst_gradient
from tests.ranks import on_ranks
from tilewright.parallel.pipeline.stage_split import Pipeline

pytestmark = pytest.mark.dist
SCHEDULES = {
    "1f1b": Pipeline(2, "1f1b"),
    "gpipe": Pipeline(2, "gpipe"),
    "interleaved": Pipeline(2, "interleaved", 2),
    "interleaved_zero_bubble": Pipeline(2, "interleaved_zero_bubble", 2),
    "interleaved_deferred": Pipeline(2, "interleaved_deferred", 2),
    "zbv": Pipeline(2, "zbv", 2),
    "dualpipe_v": Pipeline(2, "dualpipe_v", 2),
}
KINDS = ("gqa", "mla", "gqa_moe")


def _cases(rank, cases):
    return [worst_gradient(*case) for case in cases]


def _check(cases, results):
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        pipeline, kind, *_ = case
        worst = max(error for error, _ in of_ranks)
        assert worst[0] <= TOLERANCE, f"{case}: {worst[1]} is off by {worst[0]:.2g}"
        names = [name for _, names in of_ranks for name in names]
        whole = {name for name, _ in decoder(kind, pipeline.num_stages + 1).named_parameters()}
        assert set(names) == whole, "all parts are somewhere, under the model's own names"


@pytest.mark.support("decoder", "stages")
@pytest.mark.support("experts", "stages")
@pytest.mark.support("checkpointing", "stages")
@pytest.mark.support("accumulation", "stages")
def test_on_two_ranks():
    """Each schedule with tied ends, each kind of model in another one."""
    kinds = {"1f1b": "mla", "interleaved": "gqa_moe"}
    cases = [(SCHEDULES[name], kind) for name, kind in kinds.items()]
    cases += [(SCHEDULES["zbv"], "gqa", 1, 1, "full")]
    cases += [(pipeline, "tied") for pipeline in SCHEDULES.values()]
    _check(cases, on_ranks(2, _cases, cases))


@pytest.mark.slow
def test_more_on_two_ranks():
    few = ("1f1b", "interleaved", "zbv")
    cases = [(pipeline, kind) for name, pipeline in SCHEDULES.items() for kind in (KINDS if name in few else ["gqa"])]
    cases += [(SCHEDULES["1f1b"], "gqa", 1, 1, "full")]
    _check(cases, on_ranks(2, _cases, cases))


def test_with_shards_and_copies_on_four_ranks():
    """Experts and tied ends in shards, recomputed layers; copies."""
    cases = [(SCHEDULES["zbv"], "gqa_moe", 2, 1, "full"), (SCHEDULES["interleaved"], "tied", 2)]
    cases += [(SCHEDULES["1f1b"], "mla", 1, 2)]
    _check(cases, on_ranks(4, _cases, cases))


@pytest.mark.slow
def test_more_with_shards_on_four_ranks():
    kinds = {"gpipe": "tied", "interleaved_deferred": "gqa_moe", "zbv": "tied", "dualpipe_v": "gqa", "1f1b": "gqa_moe",
             "interleaved_zero_bubble": "gqa"}  # fmt: skip
    cases = [(SCHEDULES[name], kind, 2) for name, kind in kinds.items()]
    cases += [(SCHEDULES["dualpipe_v"], "tied", 2, 1, "full"), (Pipeline(4), "tied")]
    _check(cases, on_ranks(4, _cases, cases))


MORE = [(Pipeline(4), "gqa"), (SCHEDULES["1f1b"], "tied", 1, 2), (Pipeline(4, "interleaved", 3), "deepseek")]
MORE += [(Pipeline(4, "gpipe"), "mla_q_rank"), (Pipeline(4, "interleaved_deferred", 2), "tied")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [*SCHEDULES, "more"])
def test_all_of_them(name):
    """Each shape of the decoder in shards, kept and recomputed; minutes on a machine that does other things too."""
    modes = ("none", "full")
    cases = MORE if name == "more" else [(SCHEDULES[name], kind, 2, 1, mode) for kind in SHAPES for mode in modes]
    _check(cases, on_ranks(4, _cases, cases, seconds=1500))

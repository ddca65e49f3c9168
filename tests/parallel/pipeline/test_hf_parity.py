"""Gradients of Hugging Face models in stages are those of one process: scaled embeddings, experts, tied ends. A model
that cannot be cut is refused in words."""

import pytest

from tests.parallel.pipeline.ragged import TOLERANCE, model_of, worst_gradient
from tests.parallel.pipeline.test_parity import SCHEDULES
from tests.ranks import on_ranks
from tests.zoo.families import FAMILIES as ZOO
from tilewright.core.errors import ConfigError
from tilewright.parallel.pipeline.rank_stages import hold_stages
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.parallel.world import Group

pytestmark = pytest.mark.dist
FAMILIES = ("llama", "qwen3-tied", "qwen3_moe", "deepseek_v3", "granite")


def _cases(rank, cases):
    return [worst_gradient(*case) for case in cases]


def _check(cases, results):
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        pipeline, kind, *_ = case
        worst = max(error for error, _ in of_ranks)
        assert worst[0] <= TOLERANCE, f"{case}: {worst[1]} is off by {worst[0]:.2g}"
        names = {name for _, names in of_ranks for name in names}
        whole = {name for name, _ in model_of(kind, pipeline.num_stages + 1).named_parameters()}
        assert names == whole, "all parts are somewhere, under the model's own names"


def test_families_on_two_ranks():
    cases = [(SCHEDULES["1f1b"], kind) for kind in FAMILIES]
    cases += [(SCHEDULES["zbv"], "qwen3-tied"), (SCHEDULES["interleaved"], "granite")]
    _check(cases, on_ranks(2, _cases, cases))


@pytest.mark.slow
def test_in_shards_on_four_ranks():
    """By default a family is in shards of stages with its experts (`test_spread_stages`)."""
    cases = [(SCHEDULES["zbv"], "qwen3-tied", 2), (SCHEDULES["1f1b"], "granite", 2)]
    _check(cases, on_ranks(4, _cases, cases))


def _cut(name, kind, shards=1, recompute="none"):
    """Matrices are cut over two ranks."""
    return SCHEDULES[name], kind, shards, 1, recompute, 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cut_on_four_ranks():
    """By default a run is, `tests.training.test_pipeline_hf`. All families in all schedules were
    compared once: benchmarks/results/pipeline_parity.json."""
    cases = [_cut("1f1b", "llama"), _cut("zbv", "qwen3-tied"), _cut("interleaved_deferred", "deepseek_v3")]
    cases += [_cut("dualpipe_v", "qwen3_moe", recompute="full")]
    _check(cases, on_ranks(4, _cases, cases))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cut_in_shards_on_eight_ranks():
    cases = [_cut("zbv", "qwen3_moe", 2), _cut("interleaved", "granite", 2, "full")]
    _check(cases, on_ranks(8, _cases, cases))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_schedules():
    cases = [(pipeline, kind) for pipeline in SCHEDULES.values() for kind in (*FAMILIES, "granite-tied")]
    _check(cases, on_ranks(2, _cases, cases, seconds=900))


@pytest.mark.parametrize("name", ["mamba", "vit"])
def test_what_cannot_be_cut_is_refused_in_words(name):
    family = next((one for one in ZOO if one.name == name), None)
    assert family is not None
    with pytest.raises(ConfigError, match="Model that cannot be cut into stages") as caught:
        hold_stages(family.model(), Pipeline(2), Group(0, 2))
    assert "parallel.pp = 2: " in caught.value.problems[0].got

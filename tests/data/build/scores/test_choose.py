"""What stays by scores: ranks, shares, buckets; independent of order, shards and ties."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.data.engine.build_settings import QualitySection, SampleSection
from tilewright.data.stages.scores.keep_by_score import ScoreRanks, count_scores
from tilewright.data.stages.scores.score_decisions import chances, noise_judge, quality_judge, sample_judge


def digests(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, num, np.uint64)


def ranks_of(folder, shards: list[np.ndarray]) -> ScoreRanks:
    """ScoreRanks of one domain from the scores of its shards."""
    folders = []
    for number, scores in enumerate(shards):
        (folder / str(number)).mkdir(parents=True)
        np.save(folder / str(number) / "scores.npy", scores.astype(np.float32))
        folders.append(("web", folder / str(number)))
    count_scores(folders, folder)
    return ScoreRanks.load(folder)


SCORES = st.lists(st.integers(0, 20).map(lambda v: v / 8) | st.just(float("nan")), max_size=60)


@examples(40)
@given(scores=SCORES, cuts=st.lists(st.integers(0, 60), max_size=4), seed=st.integers(0, 99))
def test_shards_and_order_change_nothing(tmp_path_factory, scores, cuts, seed):
    values, names = np.array(scores), digests(len(scores))
    has = ~np.isnan(values)
    order = np.random.default_rng(seed).permutation(len(values))
    bounds = sorted({min(cut, len(values)) for cut in cuts})
    whole = ranks_of(tmp_path_factory.mktemp("whole"), [values])
    parts = ranks_of(tmp_path_factory.mktemp("parts"), np.split(values[order], bounds))
    assert json.dumps([[v.tolist() for v in pair] for pair in whole.domains.values()]) == json.dumps(
        [[v.tolist() for v in pair] for pair in parts.domains.values()]
    )
    if not has.any():
        return
    for make in (
        lambda ranks: sample_judge(SampleSection(weights=(1.0, 0.4, 0.1), seed=seed), ranks),
        lambda ranks: quality_judge(QualitySection(keep_top=0.5), ranks),
    ):
        stays = make(whole)("web", values[has], names[has]).stays
        for i in range(int(has.sum())):  # one by one, as if each were a shard
            one = make(parts)("web", values[has][i : i + 1], names[has][i : i + 1])
            assert one.stays[0] == stays[i]


def test_ranks_are_uniform_and_ordered(tmp_path):
    values = np.round(np.random.default_rng(1).normal(2, 0.3, 5000), 1)  # many ties
    ranks = ranks_of(tmp_path, [values]).of("web", values, digests(5000))
    assert ((ranks >= 0) & (ranks < 1)).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff([ranks[values == v].mean() for v in np.unique(values)]) > 0).all()
    assert abs(np.sort(ranks) - np.arange(5000) / 5000).max() < 0.02
    assert values[order[0]] == values.min()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_the_best_share_stays(tmp_path, share, spread):
    """Also where all scores are the same: then a hash decides."""
    values = np.round(0.5 + 0.4 * spread * np.random.default_rng(2).random(4000), 4)
    judge = quality_judge(QualitySection(keep_top=share), ranks_of(tmp_path, [values[:1000], values[1000:]]))
    stays = judge("web", values, digests(4000)).stays
    assert stays.mean() == pytest.approx(share, abs=4 * np.sqrt(0.25 / 4000))
    if spread and share < 1:
        assert values[stays].min() >= values[~stays].max()


def test_thresholds_pass_at_their_value():
    scores = np.array([0.29999, 0.3, 0.30001], np.float32).astype(np.float64)
    verdict = quality_judge(QualitySection(threshold=0.3), None)("web", scores, digests(3))
    assert verdict.stays.tolist() == [False, True, True]
    assert (verdict.values[0], verdict.thresholds[0]) == ("0.29999", "0.3")
    assert quality_judge(QualitySection(), None)("web", scores, digests(3)).stays.all()
    scores = np.array([-0.1, 0.25, 0.2502], np.float32).astype(np.float64)
    assert noise_judge(0.25)("web", scores, digests(3)).stays.tolist() == [True, True, False]


@pytest.mark.parametrize("shape", ["steps", "smooth"])
def test_each_bucket_keeps_its_share(tmp_path, shape):
    values = np.round(np.random.default_rng(3).gamma(9, 0.25, 30_000), 3)
    sample = SampleSection(weights=(1.0, 0.5, 0.2), shape=shape, domain_weights={"web": 0.5})
    verdict = sample_judge(sample, ranks_of(tmp_path, [values]))("web", values, digests(30_000))
    third = np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values)
    means = [0.5, 0.25, 0.1]
    if shape == "smooth":  # the mean of the line between the points (0, 1), (1/2, 1/2), (1, 1/5) over each third
        grid = (np.arange(30_000) + 0.5) / 30_000
        line = np.interp(grid, [0, 0.5, 1], [1.0, 0.5, 0.2])
        means = [0.5 * line[k * 10_000 : (k + 1) * 10_000].mean() for k in range(3)]
    for k, mean in enumerate(means):
        assert verdict.stays[third == k].mean() == pytest.approx(mean, abs=4 * np.sqrt(0.25 / 10_000)), k
    gone = np.flatnonzero(~verdict.stays)
    assert verdict.values[gone[0]] == f"{values[gone[0]]:.3f} bits per byte"
    assert verdict.thresholds[gone[0]].startswith("kept with probability 0.")


def test_other_seeds_choose_others(tmp_path):
    values = np.full(2000, 1.5)
    ranks = ranks_of(tmp_path, [values])
    kept = [
        sample_judge(SampleSection(weights=(0.5,), seed=seed), ranks)("web", values, digests(2000)).stays
        for seed in (0, 1, 0x7A2B)
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (kept[a] & kept[b]).mean() == pytest.approx(0.25, abs=0.05)
    assert chances(np.array([0.0, 0.999]), (0.3,), "smooth").tolist() == [0.3, 0.3]

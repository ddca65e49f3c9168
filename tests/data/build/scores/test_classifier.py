"""The quality model: its features, what it learns and refuses, calibration, and files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests import draws
from tests.data.build.corpora import changed, prose
from tilewright.core.errors import DataError
from tilewright.data.stages.scores import classifier
from tilewright.data.stages.scores.classifier import (
    auc_error,
    calibration,
    frequencies,
    load_quality,
    mean_weights,
    train_quality,
)

pytest.importorskip("sklearn")


def examples(num: int, share: float) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Prose, and prose of which `share` of the words are made-up numbers; labels; keys of folds."""
    good = [prose(seed, 120).encode() for seed in range(num)]
    bad = [changed(prose(1000 + seed, 120), share, seed).encode() for seed in range(num)]
    return good + bad, np.arange(2 * num) < num, np.arange(2 * num, dtype=np.uint64) * np.uint64(7)


@draws.examples(20)
@given(texts=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_features_are_the_frequencies_that_the_score_sums(texts, seed):
    weights = np.random.default_rng(seed).integers(-(1 << 20), 1 << 20, 1 << 18).astype(np.int32)
    rows = frequencies(texts)
    assert np.allclose(rows.sum(1), 1, atol=1e-5)
    wanted = rows.astype(np.float64) @ (weights / 65536)
    assert np.allclose(mean_weights(weights, texts), wanted, atol=1e-4), "frequencies are float32: 2^-24 of 16"


def test_it_tells_what_differs_and_says_how_well():
    texts, is_good, keys = examples(80, 0.3)
    model = train_quality(texts, is_good, keys, allow_weak=False)
    fresh, labels, _ = examples(200, 0.3)
    scores = model.scores(fresh[80:200] + fresh[-120:])
    labels = np.concatenate([labels[80:200], labels[-120:]])
    measured = np.mean(scores[labels][:, None] > scores[~labels][None])
    assert model.account["auc"] > 0.95
    assert measured == pytest.approx(model.account["auc"], abs=4 * model.account["auc_error"] + 0.02)
    assert abs(np.mean(scores) - 0.5) < 0.1, "calibrated for equally frequent labels"
    assert model.account["brier"] < 0.1


def test_a_weak_signal_is_calibrated():
    """Scores of a difference that is hard to see mean what they say: the share that is good, within three errors."""
    texts, is_good, keys = examples(150, 0.02)
    account = train_quality(texts, is_good, keys, allow_weak=True).account
    assert 0.6 < account["auc"] < 0.99
    for score, share, num in account["calibration"]:
        assert abs(score - share) < 0.05 + 3 * np.sqrt(0.25 / num), account["calibration"]


def test_chance_is_refused_unless_that_is_asked_for():
    texts, _, keys = examples(60, 0.3)
    labels = np.arange(len(texts)) % 2 == 0
    with pytest.raises(DataError, match="hardly better than chance") as caught:
        train_quality(texts[:60] * 2, np.repeat([True, False], 60), keys, allow_weak=False)
    assert "allow_weak = true" in str(caught.value)
    assert "0.6" in str(caught.value)
    weak = train_quality(texts, labels, keys, allow_weak=True)
    assert weak.account["auc"] < 0.7


def test_few_examples_are_refused():
    texts, is_good, keys = examples(20, 0.3)
    with pytest.raises(DataError, match="Too few examples") as caught:
        train_quality(texts, is_good, keys, allow_weak=False)
    assert "20 good and 20 bad" in str(caught.value)
    assert train_quality(texts, is_good, keys, allow_weak=True).account["good"] == 20
    with pytest.raises(DataError, match="Too few examples"):
        train_quality(texts[:25], is_good[:25], keys[:25], allow_weak=True)
    with pytest.raises(DataError, match="Too few examples"):
        train_quality([], np.zeros(0, bool), np.zeros(0, np.uint64), allow_weak=True)


def test_the_same_examples_give_the_same_file(tmp_path):
    texts, is_good, keys = examples(60, 0.3)
    for name in ("one", "two"):
        train_quality(texts, is_good, keys, allow_weak=False).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    model, again = load_quality(tmp_path / "one"), load_quality(tmp_path / "two")
    assert np.array_equal(model.scores(texts), again.scores(texts))
    assert model.account["good"] == model.account["bad"] == 60
    assert model.scores([]).shape == (0,)


@draws.examples(30)
@given(data=st.binary(max_size=200))
def test_other_files_are_no_model(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("model") / "m"
    path.write_bytes(data)
    with pytest.raises(DataError, match="Quality model cannot be read"):
        load_quality(path)


def test_other_tensors_are_no_model(tmp_path):
    path = tmp_path / "m.safetensors"
    for tensors, words in (
        ({"weights": np.zeros(3, np.int32)}, '{"slope": 1, "shift": 0, "account": {}}'),
        ({"weights": np.zeros(1 << 18, np.float32)}, '{"slope": 1, "shift": 0, "account": {}}'),
        ({"others": np.zeros(1 << 18, np.int32)}, '{"slope": 1, "shift": 0, "account": {}}'),
        ({"weights": np.zeros(1 << 18, np.int32)}, "[]"),
        ({"weights": np.zeros(1 << 18, np.int32)}, "{"),
    ):
        save_file(tensors, path, metadata={classifier._KEY: words})
        with pytest.raises(DataError, match="Quality model cannot be read"):
            load_quality(path)


def test_standard_error_is_that_of_many_draws():
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(400):
        good, bad = rng.exponential(1, 60), rng.exponential(0.4, 40)  # of these the formula is exact
        areas.append((good[:, None] > bad[None]).mean())
    assert np.std(areas) == pytest.approx(auc_error(float(np.mean(areas)), 60, 40), rel=0.15)


def test_calibration_by_hand():
    found = calibration(np.array([0.05, 0.95, 0.95, 0.95]), np.array([False, True, True, False]))
    assert found["calibration"] == [[0.05, 0.0, 1], [0.95, 0.6667, 3]]
    assert found["brier"] == pytest.approx((0.5 * 0.0025 + 0.25 * (0.05**2 + 0.95**2)), abs=1e-4)

"""The noise filter: noise that is made, noise that is found, the threshold, and what is refused."""

from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.data.build.scores.texts import story
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.engine.build_settings import NoiseSection
from tilewright.data.stages.scores.corruptions import KINDS
from tilewright.data.stages.scores.noise_contrast import (
    LEAST_FOR_LOSS,
    area,
    contrasts,
    joined,
    train_contrast,
    verified,
)
from tilewright.data.stages.scores.reference_texts import Piece

CLEAN = [story(seed) for seed in range(300)]


def pieces(texts: list[str]) -> list[Piece]:
    return [Piece(xxhash.xxh3_64_intdigest(text.encode()), 0, text.encode()) for text in texts]


@pytest.fixture(scope="module")
def trained():
    return train_contrast(pieces(CLEAN), [], NoiseSection(clean="x"))


def test_planted_noise_is_found(trained):
    """On texts that neither training nor threshold has seen: precision and recall are those that the account says."""
    models, found = trained
    account = verified(found, NoiseSection(clean="x", clean_loss=0.05))
    fresh = [story(seed) for seed in range(1000, 1200)]
    lost = (contrasts(models, [text.encode() for text in fresh]) > account["threshold"]).mean()
    assert lost <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 60), "the threshold rests on about 60 texts"
    recalls = {}
    for kind, make in KINDS.items():
        noise = [make(text, number).encode() for number, text in enumerate(fresh)]
        recalls[kind] = float((contrasts(models, noise) > account["threshold"]).mean())
        assert recalls[kind] == pytest.approx(account["kinds"][kind]["recall"], abs=0.1), kind
    assert min(recalls.values()) > 0.9, recalls
    recall = np.mean(list(recalls.values()))
    assert recall / (recall + lost) > 0.9
    assert account["precision"] == pytest.approx(recall / (recall + lost), abs=0.06)


def test_the_threshold_loses_what_was_asked(trained):
    _, found = trained
    for loss in (0.02, 0.1, 0.3):
        threshold = verified(found, NoiseSection(clean="x", clean_loss=loss))["threshold"]
        held = np.array(found["calibrate"])
        assert (held > threshold).mean() <= loss < (held >= threshold).mean() + 1e-9
    assert verified(found, NoiseSection(clean="x", threshold=0.25))["threshold"] == 0.25


def test_the_account_is_that_of_scikit_learn(trained):
    metrics = pytest.importorskip("sklearn.metrics")
    _, found = trained
    account = verified(found, NoiseSection(clean="x"))
    for kind, values in found["kinds"].items():
        labels = [0] * len(found["test"]) + [1] * len(values)
        assert account["kinds"][kind]["auc"] == pytest.approx(
            metrics.roc_auc_score(labels, [*found["test"], *values]), abs=5e-5
        )
    assert area(np.array([1.0, 1.0]), np.array([1.0])) == 0.5


def test_given_noise_is_the_noise():
    odd = ["".join(reversed(story(seed))) for seed in range(3000, 3080)]
    models, found = train_contrast(pieces(CLEAN), pieces(odd), NoiseSection(clean="x", noisy="y"))
    account = verified(found, NoiseSection(clean="x", noisy="y"))
    assert set(account["kinds"]) == {"given"}
    assert account["kinds"]["given"]["recall"] > 0.95
    assert (contrasts(models, [text.encode() for text in odd]) > 0).all()


def test_noise_that_is_clean_text_is_refused():
    same = [story(seed) for seed in range(5000, 5100)]
    noise = NoiseSection(clean="x", noisy="y")
    _, found = train_contrast(pieces(CLEAN), pieces(same), noise)
    with pytest.raises(DataError, match="hardly better than chance") as caught:
        verified(found, noise)
    assert "given 0." in str(caught.value)
    assert verified(found, noise.model_copy(update={"allow_weak": True}))["auc"] < 0.7


@pytest.mark.parametrize("num", [0, 1, 30])
def test_few_texts_are_refused(num):
    with pytest.raises(DataError, match="Too few texts") as caught:
        train_contrast(pieces(CLEAN[:num]), [], NoiseSection(clean="x"))
    assert f"{num} clean texts" in str(caught.value)
    if num == 30:
        assert train_contrast(pieces(CLEAN[:num]), [], NoiseSection(clean="x", allow_weak=True))
    with pytest.raises(DataError, match="Too few texts"):
        train_contrast(pieces(CLEAN[:60]), pieces(["one"]), NoiseSection(clean="x", noisy="y"))


def test_few_texts_give_no_threshold(trained):
    """The share of clean text above the greatest of m contrasts: 1 - 0.05^(1/m) in one of 20 cases."""
    _, found = trained
    few = found | {"texts": LEAST_FOR_LOSS - 1}
    with pytest.raises(DataError, match="Too few clean texts for the threshold") as caught:
        verified(few, NoiseSection(clean="x"))
    own = verified(found, NoiseSection(clean="x"))["threshold"]
    for words in (
        f"{LEAST_FOR_LOSS - 1} clean texts",
        f"need   {LEAST_FOR_LOSS}",
        f"threshold = {own:.2f} in [noise] (what these texts give)",
        "allow_weak = true",
    ):
        assert words in str(caught.value), words
    assert verified(few, NoiseSection(clean="x", threshold=0.5))["threshold"] == 0.5
    assert verified(few, NoiseSection(clean="x", allow_weak=True))["threshold"] == own
    rng = np.random.default_rng(0)
    for texts, most in ((50, 0.26), (LEAST_FOR_LOSS, 0.05)):
        lost = 1 - rng.random((20_000, texts // 5)).max(1)  # the distribution function makes any contrast uniform
        assert np.quantile(lost, 0.95) == pytest.approx(1 - 0.05 ** (5 / texts), rel=0.05)
        assert np.quantile(lost, 0.95) < most * 1.02


def test_several_pairs_are_one_account(trained):
    _, found = trained
    two = joined([found, found])
    assert len(two["test"]) == 2 * len(found["test"])
    assert verified(two, NoiseSection(clean="x"))["kinds"]["ocr"]["auc"] == pytest.approx(
        verified(found, NoiseSection(clean="x"))["kinds"]["ocr"]["auc"], abs=1e-4
    )


@examples(60)
@given(text=st.text(max_size=200), key=st.integers(0, 2**64 - 1))
def test_noise_is_made_of_any_text(text, key):
    for kind, make in KINDS.items():
        noise = make(text, key)
        assert noise == make(text, key)
        noise.encode("utf-8")
        assert len(noise) <= 8 * len(text) + 60, kind
    assert Counter(KINDS["shuffled"](text, key).split()) == Counter(text.split())

"""The noise filter: noise that is made, noise that is found, the threshold, and what is refused."""

from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.build.scores.texts import story
from tilewright.core.errors import DataError
from tilewright.data.build.config import NoiseSection
from tilewright.data.build.stages.scores.contrast import area, contrasts, joined, train_contrast, verified
from tilewright.data.build.stages.scores.corruptions import KINDS
from tilewright.data.build.stages.scores.references import Piece

CLEAN = [story(seed) for seed in range(240)]


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
    assert lost <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 48), "the threshold rests on about 48 texts"
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


def test_several_pairs_are_one_account(trained):
    _, found = trained
    two = joined([found, found])
    assert len(two["test"]) == 2 * len(found["test"])
    assert verified(two, NoiseSection(clean="x"))["kinds"]["ocr"]["auc"] == pytest.approx(
        verified(found, NoiseSection(clean="x"))["kinds"]["ocr"]["auc"], abs=1e-4
    )


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=200), key=st.integers(0, 2**64 - 1))
def test_noise_is_made_of_any_text(text, key):
    for kind, make in KINDS.items():
        noise = make(text, key)
        assert noise == make(text, key)
        noise.encode("utf-8")
        assert len(noise) <= 8 * len(text) + 60, kind
    assert Counter(KINDS["shuffled"](text, key).split()) == Counter(text.split())

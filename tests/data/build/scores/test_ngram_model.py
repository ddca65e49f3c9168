"""The n-gram model: a proper distribution, equal to a plain implementation of the paper, independent of neighbours."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.build.corpora import prose
from tests.data.build.scores.texts import story
from tests.draws import examples
from tilewright.data.stages.scores import ngram_model
from tilewright.data.stages.scores.byte_ngrams import LONGEST, blocks, hashed, mask, spaced
from tilewright.data.stages.scores.ngram_model import NgramModel, bits_per_byte, probabilities, train_ngrams

TEXT = st.text(st.characters(min_codepoint=1, max_codepoint=0x2FF), min_size=1, max_size=60).map(str.encode)
FIELD = 2.0**-12  # alpha and gamma keep 12 bits of their fractions


class PlainKneserNey:
    """Interpolated modified Kneser-Ney of Chen and Goodman 1999, section 3, with dictionaries and float64."""

    def __init__(self, texts: list[bytes], order: int):
        self.order = order
        raw = [Counter() for _ in range(order + 1)]
        for text in texts:
            padded = bytes(LONGEST) + text
            for i in range(LONGEST, len(padded)):
                for n in range(1, order + 1):
                    raw[n][padded[i + 1 - n : i + 1]] += 1
        self.counts = [Counter() for _ in range(order + 1)]
        for n in range(1, order + 1):
            before = defaultdict(set)
            if n < order:
                for gram in raw[n + 1]:
                    before[gram[1:]].add(gram[0])
            for gram, count in raw[n].items():
                whole = n == order or gram[0] == 0
                self.counts[n][gram] = count if whole else len(before[gram])
        self.totals = [Counter() for _ in range(order + 1)]
        for n in range(1, order + 1):
            for gram, count in self.counts[n].items():
                self.totals[n][gram[:-1]] += count

    def discounts(self, n: int) -> list[float]:
        one, two, three, four = (sum(c == k for c in self.counts[n].values()) for k in (1, 2, 3, 4))
        if 0 in (one, two, three, four):
            return [0, 0.5, 0.75, 1.0]
        y = one / (one + 2 * two)
        found = [1 - 2 * y * two / one, 2 - 3 * y * three / two, 3 - 4 * y * four / three]
        return [0, *(min(max(d, 0.05), k - 0.05) for k, d in enumerate(found, 1))]

    def probability(self, context: bytes, byte: int) -> float:
        padded = (bytes(LONGEST) + context)[-LONGEST:]
        p = 1 / 256
        for n in range(1, self.order + 1):
            history = padded[len(padded) - n + 1 :]
            total = self.totals[n][history]
            if not total:
                break
            discounts = self.discounts(n)
            after = {g: c for g, c in self.counts[n].items() if g[:-1] == history}
            freed = sum(discounts[min(c, 3)] for c in after.values())
            count = after.get(history + bytes([byte]), 0)
            p = (count - discounts[min(count, 3)]) / total + freed / total * p
        return p

    def bits(self, text: bytes) -> float:
        return -sum(math.log2(self.probability(text[:i], text[i])) for i in range(len(text))) / len(text)


@pytest.mark.parametrize("order", [2, 3, 5])
def test_it_is_the_model_of_the_paper(order, monkeypatch):
    """Tables so long that no gram loses its place."""
    monkeypatch.setattr(ngram_model, "_LOAD", 1 << 12)
    texts = [prose(seed, 40).encode() for seed in range(4)] + ["größe — größer".encode()]
    model, plain = train_ngrams(texts, order), PlainKneserNey(texts, order)
    asked = [prose(9, 25).encode(), texts[0], b"x", "ganz anderes größtes".encode(), bytes([255, 1, 2])]
    found = bits_per_byte([model], asked)[0]
    wanted = [plain.bits(text) for text in asked]
    bound = (2 * order * FIELD + 2.0**-13) / math.log(2)  # each order has an alpha and a gamma; then the logarithm
    worst = int(np.argmax(np.abs(found - wanted)))
    assert abs(found[worst] - wanted[worst]) <= bound, (asked[worst], found[worst], wanted[worst])


@examples(25)
@given(texts=st.lists(TEXT, min_size=1, max_size=8), context=st.binary(max_size=9), order=st.integers(2, 8))
def test_probabilities_sum_to_one(texts, context, order):
    model = train_ngrams(texts, order)
    for before in (context, texts[0][:5], b""):
        p = probabilities(model, before).astype(np.float64)
        assert (p > 0).all()
        assert abs(p.sum() - 1) <= 2 * order * FIELD, (before, p.sum())


@examples(25)
@given(texts=st.lists(TEXT, min_size=1, max_size=6), order=st.integers(2, 6))
def test_a_text_has_its_bits_whatever_is_beside_it(texts, order):
    models = [train_ngrams([b"the one text " * 9], order), train_ngrams(texts[:1], order)]
    together = bits_per_byte(models, [*texts, b""])
    alone = np.array([[bits_per_byte([model], [text])[0, 0] for text in texts] for model in models])
    assert np.array_equal(together[:, :-1], alone)
    assert (together[:, -1] == 0).all()


def test_long_texts_cross_blocks():
    model = train_ngrams([prose(1, 4000).encode()], 5)
    text = prose(2, 20_000).encode()
    assert len(text) > 1 << 16
    plain = [-math.log2(probabilities(model, text[max(0, i - 8) : i])[text[i]]) for i in range(32_760, 32_790)]
    data = text[:32_760], text[:32_790]
    two = bits_per_byte([model], list(data))[0]
    assert two[1] * 32_790 - two[0] * 32_760 == pytest.approx(sum(plain), abs=30 * 2.0**-12)


def test_what_it_learned_costs_less():
    train, test = ([story(seed, 300).encode() for seed in range(*ends)] for ends in ((0, 60), (60, 70)))
    means = [bits_per_byte([train_ngrams(train, order)], test).mean() for order in (2, 3, 5)]
    assert means[0] > means[1] > means[2]
    noise = np.random.default_rng(0).integers(1, 256, 4000, np.uint8).tobytes()
    assert bits_per_byte([train_ngrams(train, 5)], [noise])[0, 0] > 8 > 4 > means[2]


def test_few_places_leave_a_distribution(monkeypatch):
    """Grams that are too many, or that lose their place, are left out; what remains still sums to 1."""
    monkeypatch.setattr(ngram_model, "MOST_GRAMS", 200)
    monkeypatch.setattr(ngram_model, "_LOAD", 1)
    texts = [prose(seed, 500).encode() for seed in range(4)]
    model = train_ngrams(texts, 5)
    assert max(len(table) for table in model.tables) < 4096
    for i in range(0, 400, 29):
        assert abs(probabilities(model, texts[0][:i]).astype(np.float64).sum() - 1) <= 10 * FIELD


def test_tensors_are_the_model():
    model = train_ngrams([b"some text of a few words"], 4)
    again = NgramModel.of(model.tensors("a."), "a.")
    assert again.order == 4
    assert np.array_equal(bits_per_byte([model], [b"words of text"]), bits_per_byte([again], [b"words of text"]))


@pytest.mark.parametrize("length", [1, 3, 8])
def test_hashes_are_spread(length):
    """Over 256 buckets by the upper and by the lower bits: chi-squared within six standard deviations."""
    data, _, _ = spaced([prose(3, 8000).encode()])
    grams = np.unique(np.concatenate([last for _, last in blocks(data)]) & mask(max(length, 3)))
    hashes = hashed(grams, max(length, 3))
    for part in (hashes >> np.uint64(56), hashes & np.uint64(255)):
        counts = np.bincount(part.astype(np.int64), minlength=256)
        mean = len(hashes) / 256
        assert ((counts - mean) ** 2 / mean).sum() < 255 + 6 * math.sqrt(2 * 255)

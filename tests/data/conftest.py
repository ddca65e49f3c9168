"""A small folder of real-looking text in three domains, prepared once for all data tests."""

import random
from pathlib import Path

import pytest

from tilewright.data.prepare import prepare

WORDS = [
    a + b
    for a in ["ba", "ce", "di", "fo", "gu", "ha", "ki", "lo", "mu", "ne", "po", "ra", "si", "to", "vu", "za"]
    for b in ["l", "n", "r", "s", "t", "x", "ma", "ne"]
]


def write_text(seed: int, num_words: int) -> str:
    """Lines of invented words, different for each seed."""
    rng = random.Random(seed)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    return "\n".join(" ".join(words[i : i + 11]) for i in range(0, num_words, 11)) + "\n"


@pytest.fixture(scope="module", autouse=True)
def prepares_here():
    """Not here: data is prepared by a process of its own, as users do."""


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """40 + 25 + 15 documents of 30 to 400 words in sub-folders a, b, c."""
    root = tmp_path_factory.mktemp("corpus")
    rng = random.Random(5)
    for domain, count in (("a", 40), ("b", 25), ("c", 15)):
        (root / domain).mkdir()
        for i in range(count):
            text = write_text(ord(domain) * 1000 + i, rng.randint(30, 400))
            (root / domain / f"doc{i:03}.txt").write_text(text)
    return root


@pytest.fixture(scope="session")
def prepared(corpus_folder, tmp_path_factory):
    """The folder prepared for causal_lm in rows of 64."""
    return prepare(
        str(corpus_folder), seq_len=64, vocab_size=400, holdout=0.1, cache_dir=str(tmp_path_factory.mktemp("cache"))
    )

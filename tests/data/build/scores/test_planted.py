"""A known share of bad records is planted: how much of it goes, how much else; the same bytes from two processes."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, digest, settings
from tests.data.build.scores.texts import story, write_texts
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.stages.scores.corruptions import KINDS

NUM_STORIES, NUM_PLANTED = 360, 12
PLANTED = ("shuffled", "boilerplate", "symbols")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """360 stories and 12 planted records of each kind: 9 % of all. Examples of clean text and noise beside them."""
    texts = {f"in/a/{i:03}.txt": story(i) for i in range(NUM_STORIES)}
    texts |= {f"good/{i}.txt": story(6000 + i) for i in range(480)}
    for kind in PLANTED:
        texts |= {f"in/a/{kind}-{i:02}.txt": KINDS[kind](story(8000 + i), i) for i in range(NUM_PLANTED)}
        texts |= {f"bad/{kind}-{i}.txt": KINDS[kind](story(9000 + i), 100 + i) for i in range(80)}
    return write_texts(tmp_path_factory.mktemp("planted"), texts)


def sections(corpus: Path, name: str) -> dict:
    examples = {"good": str(corpus / "good"), "bad": str(corpus / "bad")}
    return {
        "quality of good and bad examples": {"quality": examples | {"threshold": 0.5, "example_bytes": 1 << 16}},
        "noise against clean text": {"noise": {"clean": examples["good"]}},
        "noise against given noise": {"noise": {"clean": examples["good"], "noisy": examples["bad"]}},
        "noise against the corpus itself": {"noise": {"clean": "corpus"}},
    }[name]


@pytest.mark.parametrize(
    ("name", "least_recall", "most_lost"),
    [
        ("quality of good and bad examples", 0.97, 0.005),
        ("noise against clean text", 0.97, 0.05),  # the greatest of about 96 texts: 5 % are below it with p = 0.99
        ("noise against given noise", 0.97, 0.05),
        ("noise against the corpus itself", 0.85, 0.03),  # it learns from what is planted, too
    ],
)
def test_what_is_planted_goes(corpus, tmp_path, name, least_recall, most_lost):
    build(settings(corpus / "in", **sections(corpus, name)), tmp_path)
    stage = "quality" if name.startswith("quality") else "noise"
    gone = Counter()
    for file in sorted((tmp_path / "rejects").glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            if row["stage"] == stage:
                gone[row["path"].removeprefix("a/").rpartition("-")[0] or "story"] += 1
    recalls = {kind: gone[kind] / NUM_PLANTED for kind in PLANTED}
    recall, lost = sum(recalls.values()) / len(recalls), gone["story"] / NUM_STORIES
    print(f"{name}: {100 * recall:.1f} % of what is planted goes ({recalls}), {100 * lost:.2f} % of the rest")
    assert recall >= least_recall, recalls
    assert lost <= most_lost


@pytest.mark.dist
def test_two_processes_give_the_same_bytes(corpus, tmp_path):
    config = settings(corpus / "in", **sections(corpus, "noise against the corpus itself"))
    build(config, tmp_path / "one")
    with LocalExecutor(2) as executor:
        build(config, tmp_path / "two", executor)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")

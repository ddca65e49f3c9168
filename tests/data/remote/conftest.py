"""Two domains of invented text as a built dataset with small shards."""

from pathlib import Path

import pytest

from tests.data.build.corpora import build, prose, settings

DOMAINS = {"news": 60, "tales": 40}


def publish(root: Path, shard_bytes: int = 1500, **more) -> Path:
    """A dataset of two domains."""
    for number, (name, count) in enumerate(DOMAINS.items()):
        (root / "in" / name).mkdir(parents=True)
        for i in range(count):
            (root / "in" / name / f"{i:02}.txt").write_text(prose(1000 * number + i, 60 + 7 * (i % 9)))
    build(settings(root / "in", shards={"bytes": shard_bytes}, tokenizer={"vocab_size": 400}, **more), root / "out")
    return root / "out"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    """Of about 40 shards."""
    return publish(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def windowed(tmp_path_factory) -> Path:
    """The same in windows whose context is no target."""
    return publish(tmp_path_factory.mktemp("windowed"), chunk={"tokens": 32})

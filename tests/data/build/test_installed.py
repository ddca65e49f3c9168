"""The installed text as a data build: the limit, the split, a kill, and what a run asks for."""

import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.data.test_split import jaccard, shingles_of
from tilewright.core import env
from tilewright.data.dataset.open_built import read_dataset
from tilewright.data.engine.build_files import list_inputs
from tilewright.data.engine.build_settings import SplitSection, load_data_toml
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.shipped.build_installed import installed_build
from tilewright.data.prepare import prepare
from tilewright.data.stages.split.split_stage import within

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {"max_bytes": 400_000, "vocab_size": 400, "seq_len": 64, "holdout": 0.1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def prepared(cache):
    return prepare("installed", cache_dir=str(cache), **OPTIONS)


def entry(cache):
    (found,) = (cache / "data").glob("text-*/")
    return found


def records(cache):
    files = sorted((entry(cache) / "records").glob("*.parquet"))
    return [row | {"split": file.name.partition("-")[0]} for file in files for row in pq.read_table(file).to_pylist()]


def test_it_is_a_built_dataset(prepared, cache):
    """Whole, without the units it was made of, and what training reads of it adds up."""
    assert set(prepared.domains) == {"code", "cpp", "docs", "notes", "tests"}
    assert read_dataset(entry(cache))["summary"]["docs"] == prepared.summary["docs"] == len(records(cache))
    assert [path.name for path in (cache / "data").iterdir() if path.name.endswith(".build")] == []
    for name, counts in prepared.summary["read"].items():
        assert counts["found"] == counts["used"] + counts["refused"], name
    assert "max_bytes reached" in prepared.summary["refused"]
    assert 0.9 * OPTIONS["max_bytes"] < prepared.summary["bytes"] <= OPTIONS["max_bytes"]
    assert ".so" in prepared.summary["file_types_not_read"]


def test_domains_share_the_limit(prepared):
    """Equally, where each has enough."""
    sizes = {name: counts["bytes"] for name, counts in prepared.summary["domains"].items()}
    assert max(sizes.values()) < 1.3 * OPTIONS["max_bytes"] / 5, sizes


def test_near_copies_are_gone_and_stay_on_one_side(prepared, cache):
    """By sets of words: nothing held out resembles what is trained on, and no two texts are as good as equal."""
    texts = [(row["split"], shingles_of(row["text"])) for row in records(cache)]
    worst = {"across": 0.0, "within": 0.0}
    for (one, a), (two, b) in itertools.combinations(texts, 2):
        small, large = sorted((len(a), len(b)))
        if small < 0.5 * large:
            continue
        kind = "within" if one == two else "across"
        worst[kind] = max(worst[kind], jaccard(a, b))
    assert worst["across"] < 0.5, worst
    assert worst["within"] < 0.8, worst


def test_a_sample_leads_to_its_file(prepared):
    rows = prepared.describe_row("docs", 0)
    assert all(row["path"] and row["id"] for row in rows)


def test_other_rows_of_the_same_text_build_nothing(prepared, cache, monkeypatch):
    """Nor is it asked what each of the installed files would give."""
    monkeypatch.setattr("tilewright.data.sources.installed_text._parts_of", None)
    before = entry(cache).stat().st_mtime_ns
    assert prepare("installed", cache_dir=str(cache), **OPTIONS | {"seq_len": 32}).seq_len == 32
    assert entry(cache).stat().st_mtime_ns == before


def test_settings_of_a_run_reach_the_build(tmp_path):
    run = {"domains": ("code",), "max_bytes": 800, "holdout": 0.3, "vocab_size": 999, "tokenizer": "", "seed": 5}
    build = installed_build(**run)
    assert (build.read.domains, build.read.seed, build.read.max_bytes) == (("code",), 5, 1000)
    assert (build.split.max_bytes, build.split.holdout, build.split.seed) == (800, 0.3, 5)
    assert build.tokenizer.vocab_size == 999
    assert installed_build(**run | {"max_bytes": 0}).read.max_bytes == 0
    assert installed_build(**run | {"tokenizer": str(tmp_path)}).tokenizer.path == str(tmp_path)


def test_it_is_one_of_several_sources(tmp_path):
    """As a domain of the name that it is given."""
    (tmp_path / "notes.txt").write_text("a note")
    (tmp_path / "data.toml").write_text('[read]\nsources = { mine = "notes.txt", python = "installed" }\n')
    listing = list_inputs(load_data_toml(tmp_path / "data.toml").read)
    found = {shard[0].domain: [item.name for item in shard] for shard in listing.shards}
    assert set(found) == {"mine", "python"}
    assert found["mine"] == ["mine/notes.txt"]


def test_a_killed_preparation_goes_on(prepared, cache, tmp_path, monkeypatch):
    """Killed once its texts are read: what is finished is not read again, and the result is the same."""
    call = f"prepare('installed', cache_dir={str(tmp_path)!r}, **{OPTIONS!r})"
    code = f"from tilewright.data.prepare import prepare\n{call}"
    killed = subprocess.Popen([sys.executable, "-c", code], env=env.importing(ROOT / "src"), start_new_session=True)
    deadline = time.monotonic() + 60
    while not (found := sorted((tmp_path / "data").glob("*.build/work/rules/00001/receipt.json"))):
        assert time.monotonic() < deadline
        assert killed.poll() is None
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(list(found[0].parents[2].glob("read/*/receipt.json"))) >= 5
    made = []
    work = BuildStage.work
    monkeypatch.setattr(BuildStage, "work", lambda stage, c, i: made.append((stage.name, i)) or work(stage, c, i))
    prepare("installed", cache_dir=str(tmp_path), **OPTIONS)
    assert not [index for stage, index in made if stage == "read"]
    assert ("encode", 0) in made
    theirs, mine = entry(tmp_path), entry(cache)
    assert theirs.name == mine.name
    assert (theirs / "manifest.json").read_bytes() == (mine / "manifest.json").read_bytes()


@examples(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=60),
    st.integers(1, 3000),
    st.integers(0, 5),
)
def test_the_limit_holds(records, max_bytes, seed):
    """Never passed; a domain within its equal share keeps everything, and so do records without text."""
    domain_of, lengths = np.array(records).T
    stays = within(domain_of, lengths, np.arange(len(records)), SplitSection(max_bytes=max_bytes, seed=seed))
    assert lengths[stays].sum() <= max_bytes
    assert stays[lengths == 0].all()
    with_text = [domain for domain in range(4) if lengths[domain_of == domain].sum()]
    for domain in with_text:
        if lengths[domain_of == domain].sum() <= max_bytes // len(with_text):
            assert stays[domain_of == domain].all()
    assert within(domain_of, lengths, np.arange(len(records)), SplitSection(max_bytes=0)).all()

"""A whole build: what stays and why the rest goes, the same bytes from any number of processes, and what runs again."""

import json
import platform
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, build_as_ranks, digest, prose, settings, write_corpus
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.engine.build_settings import load_data_toml
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.engine.unit_folders import Units

RULES = {"rules": {"min_words": 20}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    build(settings(corpus, **RULES), out)
    return out


def rejects(out: Path) -> list[dict]:
    return [row for file in sorted((out / "rejects").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def records(out: Path) -> list[dict]:
    return [row for file in sorted((out / "records").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_every_drop_has_its_reason(corpus, built):
    found = {(row["path"], row["rule"]) for row in rejects(built)}
    assert {
        ("prose/empty.txt", "empty file"),
        ("prose/blank.txt", "blank record"),
        ("prose/short.txt", "min_words"),
        ("rows/image.bin", "file type is not read"),
        ("rows/rows.jsonl", "line is not JSON"),
        ("rows/rows.jsonl", "no field 'text'"),
        ("prose/copy.txt", "exact duplicate"),
        ("rows/more.txt", "exact duplicate"),
        ("prose/04.txt", "near-copy"),
    } == found, "near.txt is the longer one of the two, so 04.txt goes"
    near = next(row for row in rejects(built) if row["rule"] == "near-copy")
    similarity, _, stays = near["value"].partition(" with ")
    assert 0.8 <= float(similarity) < 1
    assert stays == next(row["id"] for row in records(built) if row["path"] == "prose/near.txt")


def test_found_is_used_and_refused(built):
    read = json.loads((built / "dataset.json").read_bytes())["summary"]["read"]
    for name, counts in read.items():
        assert counts["found"] == counts["used"] + counts["refused"], name
    assert read["documents"]["used"] == len(records(built)) == 60


@pytest.mark.parametrize("chunk", [{}, {"chunk": {"tokens": 64}}], ids=["whole", "windows"])
def test_a_record_whose_end_is_held_out_is_one_document(tmp_path, chunk):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(prose(1, 600))
    summary = build(settings(tmp_path / "in", **chunk), tmp_path / "out")["summary"]
    found = records(tmp_path / "out")
    assert {row["id"] for row in found if row["chunk"] == 0} == {found[0]["id"]}
    assert sum(row["chunk"] == 0 for row in found) == 2, "in both splits"
    assert summary["read"]["documents"] == {"found": 1, "used": 1, "refused": 0}
    assert sum(of_domain["text"] for of_domain in summary["records"].values()) == 1


def test_places_are_those_of_the_files(corpus, built):
    for row in records(built):
        data = (corpus / row["path"]).read_bytes()[row["start"] : row["stop"]]
        text = json.loads(data)["text"] if row["part"].startswith("row") else data.decode()
        assert row["text"] == text.strip("\n"), row["path"]


def test_tokens_are_those_of_the_records(built):
    tokenizer = load_tokenizer(built / "tokens" / "tokenizer")
    table = pq.read_table(built / "tokens" / "documents.parquet").to_pylist()
    by_split = {name: np.load(built / "tokens" / f"{name}.npy") for name in ("train", "holdout")}
    at = dict.fromkeys(by_split, 0)
    texts = {row["id"]: row["text"] for row in records(built)}
    assert len(table) == len(texts)
    for row in table:
        start = at[row["split"]]
        at[row["split"]] = start + row["length"]
        ids = by_split[row["split"]][start : start + row["length"]]
        assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert ids[1:-1].tolist() == tokenizer.encode(texts[row["id"]])
    assert at == {name: len(tokens) for name, tokens in by_split.items()}


@pytest.mark.dist
@pytest.mark.parametrize("processes", [2, 4])
def test_any_number_of_processes_gives_the_same_bytes(corpus, built, tmp_path, processes):
    with LocalExecutor(processes) as executor:
        build(settings(corpus, **RULES), tmp_path, executor)
    assert digest(tmp_path) == digest(built)


def test_two_ranks_give_the_same_bytes(corpus, built, tmp_path):
    build_as_ranks(settings(corpus, **RULES), tmp_path)
    assert digest(tmp_path) == digest(built)


def test_a_finished_unit_never_runs_again(corpus, tmp_path):
    first = build(settings(corpus, **RULES), tmp_path)["units"]
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "work").rglob("receipt.json")}
    second = build(settings(corpus, **RULES), tmp_path)["units"]
    assert first["finished before"] == 0
    assert second == {"made": 0, "finished before": first["made"]}
    assert times == {p: p.stat().st_mtime_ns for p in (tmp_path / "work").rglob("receipt.json")}


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"rules": {"min_words": 21}}, ["rules", "dataset", "shards"]),  # drops the same records, for another number
        (
            {"duplicates": {"threshold": 0.95}},
            ["near", "unique", "split", "tokenizer", "encoder", "encode", "dataset", "shards"],
        ),
        ({"split": {"holdout": 0.2}}, ["split", "tokenizer", "encoder", "encode", "dataset", "shards"]),
        ({"tokenizer": {"vocab_size": 500}}, ["tokenizer", "encoder", "encode", "dataset", "shards"]),
        ({"chunk": {"tokens": 64}}, ["encode", "dataset", "shards"]),
    ],
    ids=str,  # lists: the order of a set differs from process to process, and with it the names of tests
)
def test_a_change_invalidates_what_comes_after_it(corpus, tmp_path, change, again):
    build(settings(corpus, **RULES), tmp_path)
    work = tmp_path / "work"
    before = {p: p.stat().st_mtime_ns for p in work.rglob("receipt.json")}
    build(settings(corpus, **(RULES | change)), tmp_path)
    made = {p.relative_to(work).parts[0] for p in work.rglob("receipt.json") if before.get(p) != p.stat().st_mtime_ns}
    assert made == set(again)


def test_a_changed_file_makes_its_shard_again(tmp_path):
    source = write_corpus(tmp_path / "in")
    config = settings(source, **RULES)
    build(config, tmp_path / "out")
    (source / "prose" / "05.txt").write_text(prose(999))
    counts = build(config, tmp_path / "out")["units"]
    fresh = tmp_path / "fresh"
    build(config, fresh)
    assert counts["made"] > 0
    assert digest(tmp_path / "out") == digest(fresh)
    read = sorted((fresh / "work" / "read").iterdir())
    assert counts["finished before"] >= len(read) - 1


def test_large_files_are_entered_in_the_middle(tmp_path):
    """Ranges of a file give what the whole gives, wherever they begin."""
    source = tmp_path / "in"
    source.mkdir()
    texts = [prose(i, 80 + 7 * (i % 13)) for i in range(400)]
    (source / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build(settings(source, duplicates={"near": False}), tmp_path / "out")
    found = sorted(row["text"] for row in records(tmp_path / "out"))
    assert len(list((tmp_path / "out" / "work" / "read").iterdir())) > 3
    assert found == sorted(text.strip("\n") for text in texts)


def test_datasets_opens_it(built):
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(str(built), cache_dir=str(built.parent / "hf"))
    assert set(found) == {"train", "holdout"}
    assert found["train"].num_rows + found["holdout"].num_rows == 60
    dropped = datasets.load_dataset(str(built), "rejects", cache_dir=str(built.parent / "hf"))
    assert len(dropped["train"]) == len(rejects(built))


def test_all_problems_of_a_data_toml_at_once(tmp_path):
    path = tmp_path / "data.toml"
    path.write_text('[raed]\nsource = 1\n[rules]\nmin_wrods = 5\nmax_words = "many"\n[chunk]\ntokens = 3\n')
    with pytest.raises(ConfigError) as caught:
        load_data_toml(path)
    text = str(caught.value)
    for part in ("[read]", "rules.min_words", "rules.max_words is not right", "Window of a few tokens", "data.toml:4"):
        assert part in text, text


def test_bad_sources_are_errors(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        build(settings(tmp_path / "none"), tmp_path / "out")
    assert not (tmp_path / "out" / "dataset.json").exists()
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="No files to read"):
        build(settings(tmp_path / "in"), tmp_path / "out")
    (tmp_path / "in" / "a.txt").write_text("one")
    with pytest.raises(DataError, match="Too little text"):
        build(settings(tmp_path / "in"), tmp_path / "out")
    with pytest.raises(DataError, match="Unknown data domain"):
        build(settings(tmp_path / "in", read={"domains": ("x",)}), tmp_path / "out")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told to give memory back")
def test_memory_of_a_unit_is_given_back(tmp_path):
    """Blocks below one that lives are kept by malloc when they are freed, until free pages are returned."""
    size, num, live = 1000, 100_000, []

    def work(folder: Path) -> dict[str, int]:
        blocks = [bytes(size) for _ in range(num)]
        live.append(blocks.pop())
        return {}

    process = psutil.Process()
    before = process.memory_info().rss
    Units(tmp_path).make("stage", 0, "fingerprint", work)
    grown = process.memory_info().rss - before
    assert grown < num * size / 10, f"{grown / 1e6:.0f} MB of {num * size / 1e6:.0f} MB stay"

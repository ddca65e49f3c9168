"""Whole builds with scores: what goes and why, what the page shows, and what is refused."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, settings
from tests.data.build.scores.texts import all_three, story, write_scored_corpus, write_texts
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.dataset.build_account import build_account
from tilewright.data.engine.build_settings import load_data_toml
from tilewright.report.pages.build_page import render_build

pytest.importorskip("sklearn")


def rows(out: Path, kind: str) -> list[dict]:
    return [row for file in sorted((out / kind).glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_scored_corpus(tmp_path_factory.mktemp("scores"))


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("built") / "out"
    build(settings(corpus / "in", **all_three(corpus)), out)
    return out


def test_each_goes_for_its_reason(built):
    gone = rows(built, "rejects")
    by_stage = {stage: {row["path"] for row in gone if row["stage"] == stage} for stage in ("quality", "noise")}
    loud = {row["path"] for row in gone if "loud" in row["path"]}
    assert len(loud) == 12
    assert loud <= by_stage["quality"]
    noise = [row for row in gone if "/noise" in row["path"] and row["stage"] in by_stage]
    assert len(noise) >= 14, "of 16"
    stories = [row for row in gone if row["stage"] in by_stage and "loud" not in row["path"] and row not in noise]
    assert len(stories) <= 12, "of 180"
    for row in gone:
        if row["stage"] == "quality":
            assert float(row["value"]) < float(row["threshold"]) == 0.5
        if row["stage"] == "noise":
            assert float(row["value"].split()[0]) > float(row["threshold"])
        if row["stage"] == "sample":
            assert row["rule"] == "sampled out"
            assert row["value"].endswith("bits per byte")
            assert row["threshold"] == "kept with probability 0.5"
    kept = rows(built, "records")
    for row in kept:
        scores = json.loads(row["scores"])
        assert set(scores) == {"quality", "contrast", "bits_per_byte"}
        assert scores["quality"] >= 0.5
    sampled = [row for row in gone if row["stage"] == "sample"]
    assert len(sampled) / (len(sampled) + len(kept)) == pytest.approx(0.25, abs=0.12)
    head = max(json.loads(row["scores"])["bits_per_byte"] for row in kept)
    assert float(sampled[0]["value"].split()[0]) <= head + 1


def test_found_is_used_and_refused(built):
    read = json.loads((built / "dataset.json").read_bytes())["summary"]["read"]
    for name, counts in read.items():
        assert counts["found"] == counts["used"] + counts["refused"], name


def test_the_page_has_models_and_thresholds(built):
    account = build_account(built)
    assert [model.name for model in account.models] == ["Quality model", "Noise filter", "Model to sample by"]
    assert {(one.measure, one.domain) for one in account.histograms} == {
        (measure, domain) for measure in ("quality", "contrast", "bits_per_byte") for domain in ("a", "b")
    }
    assert all(sum(one.counts) > 40 and one.thresholds for one in account.histograms)
    page = render_build(account)
    for words in ("area under the ROC curve", "share that is good", "shuffled", "some of which are noise", "contrast"):
        assert words in page


def test_other_shards_give_the_same_records(corpus, built, tmp_path):
    build(settings(corpus / "in", read={"shard_bytes": 1 << 24}, **all_three(corpus)), tmp_path)
    assert len(list((tmp_path / "work" / "read").iterdir())) < len(list((built / "work" / "read").iterdir()))
    for kind in ("records", "rejects"):
        one, two = ({json.dumps(row, sort_keys=True) for row in _same(rows(out, kind))} for out in (built, tmp_path))
        assert one == two


def _same(found: list[dict]) -> list[dict]:
    """Rows without what the split and the tokenizer add, which go by the number of a record."""
    names = ("id", "domain", "path", "part", "start", "stop", "scores", "stage", "rule", "value", "threshold")
    return [{name: row[name] for name in names if name in row} for row in found if row.get("stage") != "split"]


def test_examples_may_be_rows_or_a_model(corpus, tmp_path, caplog):
    """The same texts as folders and as rows give the same model; so does its file."""
    outs = {}
    for name, quality in (
        ("folders", {"good": str(corpus / "good"), "bad": str(corpus / "bad")}),
        ("rows", {"labelled": str(corpus / "labelled.jsonl")}),
        ("model", {"model": str(tmp_path / "rows/work/quality_model/00000/quality.safetensors")}),
    ):
        outs[name] = tmp_path / name
        build(settings(corpus / "in", quality=quality | {"keep_top": 0.9}), tmp_path / name)
    scores = {name: sorted(row["scores"] for row in rows(out, "records")) for name, out in outs.items()}
    assert scores["folders"] == scores["model"] == scores["rows"]
    assert "5 rows have no text or no label" in caplog.text
    gone = [row for row in rows(outs["rows"], "rejects") if row["rule"] == "keep_top"]
    assert {row["threshold"].split(", ")[1] for row in gone} == {"the best 0.9 of a", "the best 0.9 of b"}
    for domain, num in (("a", 122), ("b", 86)):
        assert sum(row["domain"] == domain for row in gone) == pytest.approx(0.1 * num, abs=6)


def test_the_best_copy_stays(corpus, tmp_path):
    base = story(7, 300)
    marks = {i: "!!!" for i in range(0, 300, 36)}  # signs are words of near-copies: few, or it would be no copy
    loud = " ".join(
        f"{word.upper() if i % 9 == 0 else word}{marks.get(i, '')}" for i, word in enumerate(base.split(" "))
    )
    texts = {f"in/a/{i}.txt": story(100 + i, 100) for i in range(20)}
    texts |= {"in/a/k-long.txt": loud + " " + loud.split("\n")[0], "in/a/k-short.txt": base}
    source = write_texts(tmp_path, texts) / "in"
    quality = {"good": str(corpus / "good"), "bad": str(corpus / "bad")}
    stays = {}
    for keep in ("longest", "score"):
        out = tmp_path / keep
        build(settings(source, quality=quality, duplicates={"threshold": 0.5, "keep": keep}), out)
        gone = {row["path"] for row in rows(out, "rejects") if row["rule"] == "near-copy"}
        stays[keep] = {"a/k-long.txt", "a/k-short.txt"} - gone
    assert stays == {"longest": {"a/k-long.txt"}, "score": {"a/k-short.txt"}}


def test_what_is_missing_is_said_at_once(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    sections = {
        "quality": {"good": str(tmp_path / "none"), "bad": str(tmp_path / "empty")},
        "noise": {"clean": "corpus", "noisy": str(tmp_path / "nothing"), "domains": ("x",)},
        "sample": {"reference": "corpus", "domain_weights": {"y": 0.5}},
    }
    with pytest.raises(DataError) as caught:
        build(settings(corpus / "in", **sections), tmp_path / "out")
    text = str(caught.value)
    for words in ("quality.good", "quality.bad", "is empty", "noise.noisy", "noise.domains", "sample.domain_weights"):
        assert words in text, text
    assert text.count("does not exist") == 2
    assert not (tmp_path / "out" / "work" / "read").exists()
    with pytest.raises(DataError, match="is not a file"):
        build(settings(corpus / "in", quality={"model": str(tmp_path / "empty")}), tmp_path / "out")


def test_an_empty_domain_and_a_corpus_of_one_document(corpus, tmp_path):
    source = write_texts(tmp_path / "in", {"a/one.txt": story(1, 400), "b/short.txt": "a word"})
    folder = {"quality": {"good": str(corpus / "good"), "bad": str(corpus / "bad"), "keep_top": 0.5}}
    folder |= {
        "noise": {"clean": str(corpus / "good"), "allow_weak": True},
        "sample": {"reference": str(corpus / "good")},
    }
    kept = settings(source, rules={"min_words": 9}, **{k: v | {"domains": ("b",)} for k, v in folder.items()})
    build(kept, tmp_path / "out")
    assert {row["path"] for row in rows(tmp_path / "out", "records")} == {"a/one.txt"}
    assert {row["scores"] for row in rows(tmp_path / "out", "records")} == {"{}"}
    whole = {"sample": {"reference": str(corpus / "good"), "weights": (1.0,)}, "noise": folder["noise"]}
    build(settings(source, rules={"min_words": 9}, **whole), tmp_path / "one")
    assert len(rows(tmp_path / "one", "records")) == 2, "its end is held out"
    for section, words in (("noise", "Too few texts"), ("sample", "Too little text for a model")):
        with pytest.raises(DataError, match=words) as caught:
            build(
                settings(source, **{section: {"clean" if section == "noise" else "reference": "corpus"}}),
                tmp_path / "x",
            )
        assert all(part in str(caught.value) for part in ("got", "need", "try"))


def test_conflicts_are_told_together(tmp_path):
    path = tmp_path / "data.toml"
    path.write_text(
        '[quality]\ngood = "g"\nthreshold = 0.5\nkeep_top = 0.5\n[noise]\nclean = "corpus"\nkinds = []\n'
        '[sample]\nreference = "corpus"\nweights = []\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_data_toml(path)
    text = str(caught.value)
    for words in ("Quality model cannot be made", "Two rules on the quality", "without noise", "without weights"):
        assert words in text, text
    path.write_text('[duplicates]\nkeep = "score"\n[sample]\nweights = [2.0]\n')
    with pytest.raises(ConfigError, match="Best of several copies without a score") as caught:
        load_data_toml(path)
    assert "a list of numbers, each a number, at least 0, at most 1" in str(caught.value)


def test_paths_are_those_beside_the_toml(tmp_path, caplog):
    path = tmp_path / "data.toml"
    path.write_text(
        '[quality]\nmodel = "m.safetensors"\nexample_bytes = "1MB"\n[noise]\nclean = "corpus"\n[sample]\nseed = 3\n'
    )
    found = load_data_toml(path)
    assert found.quality.model == str(tmp_path / "m.safetensors")
    assert (found.noise.clean, found.sample.reference, found.quality.good) == ("corpus", "", "")
    told = [record.getMessage().partition(" has no effect here: ")[::2] for record in caplog.records]
    assert sorted(name for name, _ in told) == ["quality.example_bytes", "sample.seed"]

"""Which library encodes a data set is said and changes no id; a text that the tokenizer fails on is set aside."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.data.build.corpora import build, settings
from tests.data.conftest import write_text
from tilewright.cli.app import run
from tilewright.data.common import encoder, guarded_tokenizer
from tilewright.data.common.encoder import FAILS, Spared, choose_encoder
from tilewright.data.common.guarded_tokenizer import TokenizerError
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer
from tilewright.data.prepare import prepare

BAD = "word " + "a" * 30_000 + "!"
"""The pattern below goes back and forth over it."""


@pytest.fixture
def texts(tmp_path):
    """A folder with thirty texts."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(write_text(i, 90))
    return folder


@pytest.fixture(scope="module")
def backtracking(tmp_path_factory):
    """A tokenizer that fails on `BAD`."""
    folder = tmp_path_factory.mktemp("tok")
    tokenizer = train_tokenizer([write_text(i, 90) for i in range(10)], 400)
    tokenizer.save(folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(r"(a|aa)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def soon(monkeypatch):
    """Limits that a test can wait for; the process of tokenizers is given them with each request."""
    monkeypatch.setattr(guarded_tokenizer, "_CPU_S", 0.3)
    monkeypatch.setattr(guarded_tokenizer, "_CHARS_PER_S", 1e6)


def streams(tokens):
    return [np.load(tokens / f"{name}.npy").tolist() for name in ("train", "holdout")]


@pytest.mark.parametrize("num_bytes", [0, encoder.MUCH_BYTES])
def test_a_build_says_who_encodes_and_ids_are_the_same(texts, tmp_path, monkeypatch, num_bytes, capsys):
    pytest.importorskip("tiktoken")
    plain = build(settings(texts), tmp_path / "plain")
    monkeypatch.setattr(encoder, "MUCH_BYTES", num_bytes)
    quick = build(settings(texts), tmp_path / "quick")
    assert plain["summary"]["encoder"].endswith("(less than 8 MB of text)")
    assert quick["summary"]["encoder"].startswith("tokenizers" if num_bytes else "tiktoken")
    assert streams(tmp_path / "plain" / "tokens") == streams(tmp_path / "quick" / "tokens")
    assert plain["fingerprint"] == quick["fingerprint"]
    assert run(["data", "inspect", str(tmp_path / "quick")]) == 0
    assert f"encoded by {quick['summary']['encoder']}" in capsys.readouterr().out


def test_prepared_text_says_who_encodes_and_ids_are_the_same(texts, tmp_path, monkeypatch):
    pytest.importorskip("tiktoken")
    plain = prepare(str(texts), cache_dir=str(tmp_path / "plain"), holdout=0.2)
    monkeypatch.setattr(encoder, "MUCH_BYTES", 0)
    quick = prepare(str(texts), cache_dir=str(tmp_path / "quick"), holdout=0.2)
    assert quick.summary["encoder"].startswith("tiktoken")
    assert streams(plain._corpus) == streams(quick._corpus)
    assert plain.fingerprint == quick.fingerprint


def test_reasons(monkeypatch, backtracking):
    tokenizer = train_tokenizer(["low lower lowest " * 20], 300)
    much = encoder.MUCH_BYTES
    assert "under limits" in choose_encoder(load_tokenizer(backtracking), much, [])[1]
    monkeypatch.setattr(encoder, "has_tiktoken", lambda: False)
    assert "not installed" in choose_encoder(tokenizer, much, ["low"])[1]


def test_other_ids_on_the_sample_leave_it_to_tokenizers(monkeypatch):
    pytest.importorskip("tiktoken")
    tokenizer = train_tokenizer(["low lower lowest " * 20], 300)
    real = encoder.ranks_of

    def wrong(backend):
        found = real(backend)
        found.ids[:] = found.ids[::-1]
        return found

    monkeypatch.setattr(encoder, "ranks_of", wrong)
    chosen, name = choose_encoder(tokenizer, encoder.MUCH_BYTES, ["low lower"])
    assert "ids of a sample differ" in name
    assert chosen.encode_batch(["low lower"]) == [tokenizer.encode("low lower")]


def test_a_build_sets_a_text_aside_that_the_tokenizer_fails_on(texts, backtracking, tmp_path, soon):
    (texts / "bad.txt").write_text(BAD)
    content = build(settings(texts, tokenizer={"path": str(backtracking)}), tmp_path / "out")
    assert content["summary"]["docs"] == 30
    assert content["summary"]["refused"][FAILS]["examples"] == "bad.txt"
    found = [
        row for file in (tmp_path / "out" / "rejects").glob("*.parquet") for row in pq.read_table(file).to_pylist()
    ]
    (row,) = [row for row in found if row["rule"] == FAILS]
    assert row["stage"] == "encode"
    assert "retry-limit" in row["value"]


def test_prepared_text_sets_it_aside(texts, backtracking, tmp_path, soon):
    (texts / "bad.txt").write_text(BAD)
    prepared = prepare(str(texts), tokenizer=str(backtracking), cache_dir=str(tmp_path / "cache"), holdout=0.2)
    assert prepared.summary["docs"] == 30
    assert prepared.summary["refused"][FAILS]["documents"] == 1
    read = prepared.summary["read"]["documents"]
    assert read["found"] == read["used"] + read["refused"] == 31


def test_conversations_set_it_aside(backtracking, tmp_path, soon):
    rows = [{"prompt": f"word {i}", "completion": write_text(i, 20)} for i in range(30)]
    rows.insert(7, {"prompt": "word", "completion": BAD})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare(
        str(tmp_path / "a.jsonl"), format="chat", chat_template="chatml", tokenizer=str(backtracking),
        cache_dir=str(tmp_path / "cache"), holdout=0.2,
    )  # fmt: skip
    assert prepared.summary["read"]["documents"]["refused"] == 1
    assert any("retry-limit" in reject["example"] for reject in prepared.rejects())


def test_a_tokenizer_that_fails_on_many_texts_is_an_error():
    def encode(texts):
        if any("bad" in text for text in texts):
            raise TokenizerError("fails", got="bad")
        return [[len(text)] for text in texts]

    spared = Spared()
    assert [isinstance(one, TokenizerError) for one in spared.encoded(encode, ["a", "bad", "b"])] == [
        False,
        True,
        False,
    ]
    assert spared.encoded(encode, ["text"] * 97) == [[4]] * 97
    for _ in range(9):
        spared.encoded(encode, ["bad"])
    with pytest.raises(TokenizerError):
        spared.encoded(encode, ["bad"] * 3)

"""Every kind of bad input, one by one: set aside with a count and a reason, or a four-part error. Never a crash."""

import gzip
import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.conftest import write_text
from tilewright.core.errors import DataError
from tilewright.data.common.progress import ProgressBar
from tilewright.data.corpus.read import collect
from tilewright.data.prepare import prepare
from tilewright.data.sources.user_files import user_source


def rows(num, seed=0):
    return [{"text": write_text(seed + i, 40), "id": i} for i in range(num)]


def jsonl(items):
    return "".join(json.dumps(item) + "\n" for item in items).encode()


def read(root, tmp_path, **options):
    """(documents, rejects as {(file, reason): count}) of a path."""
    source = user_source(str(root), **options)
    spool = collect(source, tmp_path / "spool", domains=(), max_bytes=0, seed=0, progress=ProgressBar("test"))
    data = spool.data()
    texts = [spool.text(data, i) for i in range(len(spool))]
    return texts, {(reject.path, reject.rule): reject.count for reject in spool.rejects}


@pytest.fixture
def folder(tmp_path):
    """A folder with two good documents, to which a test adds something bad."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "good.txt").write_text(write_text(1, 60))
    (root / "more.md").write_text(write_text(2, 60))
    return root


def assert_four_parts(error):
    for problem in error.problems:
        assert problem.what
        assert problem.got
        assert problem.need
        assert problem.try_


# ---- nothing usable at all: an error in four parts ----


def test_missing_path(tmp_path):
    with pytest.raises(DataError, match="No training data") as caught:
        prepare(str(tmp_path / "absent"), cache_dir=str(tmp_path))
    assert_four_parts(caught.value)
    assert caught.value.exit_code == 2


def test_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="No usable text") as caught:
        prepare(str(tmp_path / "empty"), cache_dir=str(tmp_path / "cache"))
    assert_four_parts(caught.value)
    assert not list((tmp_path / "cache" / "data").glob("*/")), "a failed preparation left something behind"


def test_only_bad_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\x00\x01\x02" * 50)
    (tmp_path / "b.txt").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        prepare(str(tmp_path), cache_dir=str(tmp_path / ".cache"))
    assert_four_parts(caught.value)
    assert "a.txt: binary" in str(caught.value)
    assert "b.txt: empty" in str(caught.value)


def test_wrong_text_field_names_the_fields(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(jsonl([{"content": "x", "id": 1}] * 3))
    with pytest.raises(DataError) as caught:
        prepare(str(tmp_path / "d.jsonl"), cache_dir=str(tmp_path))
    assert_four_parts(caught.value)
    assert "data.text_field = one of: content, id" in caught.value.problems[0].try_


def test_unknown_domain(corpus_folder, tmp_path):
    with pytest.raises(DataError, match="Unknown data domain") as caught:
        prepare(str(corpus_folder), domains=("a", "q"), cache_dir=str(tmp_path))
    assert_four_parts(caught.value)
    assert "a, b, c" in caught.value.problems[0].need


def test_too_little_text(tmp_path):
    (tmp_path / "one.txt").write_text("a few words")
    with pytest.raises(DataError, match="Too little text"):
        prepare(str(tmp_path), cache_dir=str(tmp_path / ".cache"))


def test_limit_below_every_document(corpus_folder, tmp_path):
    with pytest.raises(DataError, match="No usable text") as caught:
        prepare(str(corpus_folder), max_bytes=30, cache_dir=str(tmp_path))
    assert "max_bytes = 30" in str(caught.value)


def test_cache_that_cannot_be_written(corpus_folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written") as caught:
        prepare(str(corpus_folder), cache_dir=str(tmp_path / "file"))
    assert_four_parts(caught.value)


def test_full_disk(corpus_folder, tmp_path, monkeypatch):
    """The error says so, and no half-made entry stays."""

    def no_space(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tilewright.data.corpus.build.pq.write_table", no_space)
    with pytest.raises(DataError, match="No space left") as caught:
        prepare(str(corpus_folder), cache_dir=str(tmp_path))
    assert "max_bytes" in caught.value.problems[0].try_
    assert not [path for path in (tmp_path / "data").iterdir() if path.is_dir()]


# ---- one bad file among good ones: set aside, counted, the rest is used ----


def test_binary_file(folder, tmp_path):
    (folder / "x.txt").write_bytes(b"MZ\x90\x00\x03" + random.randbytes(500))
    texts, rejects = read(folder, tmp_path)
    assert rejects == {("x.txt", "binary, not text"): 1}
    assert len(texts) == 2


def test_empty_and_blank_files(folder, tmp_path):
    (folder / "x.txt").write_bytes(b"")
    (folder / "y.txt").write_bytes(b"\n  \n\t\n")
    texts, rejects = read(folder, tmp_path)
    assert rejects == {("x.txt", "empty file"): 1, ("y.txt", "blank record"): 1}
    assert len(texts) == 2


def test_mixed_encoding_keeps_the_good_lines(folder, tmp_path):
    lines = [f"line {i} is fine".encode() for i in range(40)]
    lines[7] = "caf\xe9".encode("latin-1")
    lines[9] = "na\xefve".encode("latin-1")
    (folder / "x.txt").write_bytes(b"\n".join(lines))
    texts, rejects = read(folder, tmp_path)
    assert rejects == {("x.txt", "line is not UTF-8"): 2}
    assert sum("line 8 is fine" in text for text in texts) == 1


def test_file_in_another_encoding(folder, tmp_path):
    (folder / "x.txt").write_bytes("\n".join(["été à Orléans"] * 9).encode("latin-1"))
    texts, rejects = read(folder, tmp_path)
    assert rejects == {("x.txt", "not UTF-8"): 1}
    assert len(texts) == 2


def test_byte_order_marks(folder, tmp_path):
    (folder / "x.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    (folder / "y.txt").write_bytes("sixteen bits".encode("utf-16"))
    texts, rejects = read(folder, tmp_path)
    assert not rejects
    assert {"with a mark", "sixteen bits"} <= set(texts)


def test_unknown_types_hidden_files_and_broken_links(folder, tmp_path):
    (folder / "x.png").write_bytes(b"\x89PNG")
    (folder / ".hidden").write_text("no")
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    os.mkfifo(folder / "pipe.txt")
    texts, rejects = read(folder, tmp_path)
    assert rejects == {
        ("x.png", "file type .png is not read"): 1,
        (".hidden", "hidden file or folder"): 1,
        ("gone.txt", "cannot be read"): 1,
        ("pipe.txt", "not a regular file"): 1,
    }
    assert len(texts) == 2


def test_file_that_vanishes_before_it_is_read(folder, tmp_path):
    (folder / "x.txt").write_text("here today")
    source = user_source(str(folder))
    (folder / "x.txt").unlink()
    spool = collect(source, tmp_path / "spool", domains=(), max_bytes=0, seed=0, progress=ProgressBar("test"))
    assert [(r.path, r.rule) for r in spool.rejects] == [("x.txt", "cannot be read")]
    assert len(spool) == 2


def test_jsonl_with_everything_wrong(folder, tmp_path):
    good = rows(5)
    bad = b'{"text": 7}\n{"other": "x"}\n[1, 2]\nnot json\n{"text": "caf\xe9"}\n{"text": "\\ud800"}\n\n{"text": null}\n'
    (folder / "x.jsonl").write_bytes(jsonl(good[:3]) + bad + jsonl(good[3:]) + b'{"text": "half a li')
    texts, rejects = read(folder, tmp_path)
    assert rejects == {
        ("x.jsonl", "field 'text' is not text"): 2,
        ("x.jsonl", "no field 'text'"): 1,
        ("x.jsonl", "row is not an object"): 1,
        ("x.jsonl", "line is not JSON"): 1,
        ("x.jsonl", "line is not UTF-8"): 1,
        ("x.jsonl", "half a Unicode surrogate pair"): 1,
        ("x.jsonl", "half-written last line"): 1,
    }
    assert len(texts) == 2 + 5


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gz", "zst"])
def test_compressed_jsonl_whole_truncated_and_damaged(folder, tmp_path, compress):
    suffix = "gz" if compress is gzip.compress else "zst"
    payload = jsonl(rows(4000, seed=100))  # several decoder blocks
    whole = compress(jsonl(rows(3, seed=50))) + compress(jsonl(rows(3, seed=60)))  # two members in one file
    cut = compress(payload)[: len(compress(payload)) * 2 // 3]
    (folder / f"whole.jsonl.{suffix}").write_bytes(whole)
    (folder / f"cut.jsonl.{suffix}").write_bytes(cut)
    (folder / f"no.jsonl.{suffix}").write_bytes(b"this is no compressed file")
    texts, rejects = read(folder, tmp_path)
    assert rejects == {
        (f"cut.jsonl.{suffix}", "truncated compressed file, the rest is lost"): 1,
        (f"no.jsonl.{suffix}", "damaged compressed file, the rest is lost"): 1,
    }
    kept = len(texts) - 2 - 6
    assert 1000 < kept < 4000, "what is before the damage is used"
    assert {r["text"].strip("\n") for r in rows(3, seed=50) + rows(3, seed=60)} <= set(texts)


def test_compressed_text(folder, tmp_path):
    (folder / "x.txt.gz").write_bytes(gzip.compress(b"from a gz file"))
    texts, rejects = read(folder, tmp_path)
    assert "from a gz file" in texts
    assert not rejects


def test_parquet_whole_truncated_without_field_and_of_another_type(folder, tmp_path):
    table = pa.table({"text": [r["text"] for r in rows(50)] + [None], "id": range(51)})
    pq.write_table(table, folder / "whole.parquet", row_group_size=20)
    data = (folder / "whole.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(data[: len(data) // 2])
    pq.write_table(table.rename_columns(["body", "id"]), folder / "field.parquet")
    pq.write_table(pa.table({"text": [1, 2, 3]}), folder / "type.parquet")
    texts, rejects = read(folder, tmp_path)
    assert rejects == {
        ("whole.parquet", "row without text"): 1,
        ("cut.parquet", "damaged parquet file"): 1,
        ("field.parquet", "no field 'text'"): 51,
        ("type.parquet", "field 'text' is not text"): 3,
    }
    assert len(texts) == 2 + 50


def test_parquet_with_a_damaged_page(folder, tmp_path):
    """The footer is whole, so the damage shows only when the rows are read."""
    table = pa.table({"text": [r["text"] for r in rows(300)]})
    pq.write_table(table, folder / "x.parquet", compression="zstd", use_dictionary=False)
    data = bytearray((folder / "x.parquet").read_bytes())
    data[200:2000] = bytes(1800)
    (folder / "x.parquet").write_bytes(bytes(data))
    texts, rejects = read(folder, tmp_path)
    assert [reason for _, reason in rejects] == ["damaged parquet file, the rest of the row group is lost"]
    assert len(texts) >= 2


def write_dataset(folder, texts):
    """The layout of `save_to_disk`: Arrow streams and a state.json that lists them."""
    folder.mkdir(parents=True)
    table = pa.table({"text": texts})
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_dataset_reads_train_only(tmp_path):
    write_dataset(tmp_path / "set" / "train", [r["text"] for r in rows(30)])
    write_dataset(tmp_path / "set" / "test", [r["text"] for r in rows(5, seed=900)])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    texts, rejects = read(tmp_path / "set", tmp_path)
    assert len(texts) == 30
    unread = "file of a saved dataset that holds no rows to read"
    assert rejects == {
        ("test", "split not trained on"): 1,
        **{(f"{name}.json", unread): 1 for name in ("dataset_dict", "train/dataset_info", "train/state")},
    }
    texts, _ = read(tmp_path / "set", tmp_path, domains=("train", "test"))
    assert len(texts) == 35


def test_damaged_dataset(folder, tmp_path):
    write_dataset(folder / "set", [r["text"] for r in rows(30)])
    arrow = folder / "set" / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:700])
    texts, rejects = read(folder, tmp_path)
    assert rejects[("set/data-00000-of-00001.arrow", "damaged Arrow file")] == 1
    assert len(texts) == 2


def test_dataset_written_by_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = [r["text"] for r in rows(40)]
    dataset = datasets.Dataset.from_dict({"text": texts, "n": list(range(40))})
    datasets.DatasetDict({"train": dataset.filter(lambda r: r["n"] % 2 == 0)}).save_to_disk(tmp_path / "set")
    found, rejects = read(tmp_path / "set", tmp_path)
    assert sorted(found) == sorted(t.strip("\n") for t in texts[::2])
    assert {reason for _, reason in rejects} == {"file of a saved dataset that holds no rows to read"}


def test_rejects_reach_summary_and_file(folder, tmp_path):
    (folder / "x.txt").write_bytes(b"\x00" * 9)
    (folder / "y.jsonl").write_bytes(b"nope\nnope\n" + jsonl(rows(6)))
    prepared = prepare(str(folder), seq_len=16, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    refused = {reason: entry["documents"] for reason, entry in prepared.summary["refused"].items()}
    assert refused == {"binary, not text": 1, "line is not JSON": 2}
    assert {(r["where"], r["count"]) for r in prepared.rejects()} == {("x.txt", 1), ("y.jsonl", 2)}
    assert "byte 0" in next(r["example"] for r in prepared.rejects() if r["where"] == "y.jsonl")


def test_bad_tokenizers(folder, tmp_path):
    for name, content, message in (
        ("absent.json", None, "No tokenizer"),
        ("torn.json", '{"version": "1.0", "mod', "cannot be read"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        with pytest.raises(DataError, match=message) as caught:
            prepare(str(folder), tokenizer=str(path), cache_dir=str(tmp_path / "cache"))
        assert caught.value.problems[0].got
        assert caught.value.problems[0].need

"""A recipe's `data.source` and a `data build` of the same folder: the same texts, ids, masks and reasons.

A recipe reads a sample into memory, a build works in units on disk. Both are made of the same functions; these tests
hold the two to each other. Encodings that a build guesses (anything but Unicode's own) are not drawn here: a recipe
refuses them.
"""

import gzip
import io
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from tests.data.build.corpora import build, prose, settings
from tests.draws import examples
from tilewright.data.common.records import DUPLICATE, EMPTY, NOTHING
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.prepare import prepare

SAME = {"repair": {"unicode": "none"}, "duplicates": {"near": False}, "split": {"holdout": 0.2}}
"""Settings of a build that does what a recipe does: no text is changed, and only equal ones are dropped."""
_texts = st.one_of(
    st.integers(0, 12).map(lambda seed: prose(seed, 30)),  # few, so that some are equal
    st.integers(0, 12).map(lambda seed: "\r\n" + prose(seed, 30).replace("\n", "\r\n")),
    st.integers(20, 30).map(lambda seed: prose(seed, 30).replace(" ", "\r", 3)),
    st.sampled_from(
        ["", " \n\t\n", "\0", "one\0two", "cafe\u0301", "\ufeff", "\ufeffone", "\u2028", "漢字 🦊", "a" * 300]
    ),
)
_rows = st.one_of(
    _texts.map(lambda text: json.dumps({"text": text})),
    _texts.map(lambda text: json.dumps({"n": 1, "text": text}, ensure_ascii=False)),
    st.sampled_from(["{no", "", "null", "[1]", '{"other": 1}', '{"text": 5}', '{"text": "\\ud800"}', '{"text": null}']),
)


def _table(texts: list[str | None]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), sink, row_group_size=3)
    return sink.getvalue()


def _csv(texts: list[str]) -> str:
    return "id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(texts) if '"' not in text)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)  # a build names a file by its bytes: no clock in them


_lists = st.lists(_texts, max_size=5)
_encodings = st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"])
_plain = st.builds(lambda text, encoding: text.encode(encoding), _texts, _encodings)
_jsonl = st.builds(
    lambda rows, end: end.join(rows).encode(), st.lists(_rows, max_size=6), st.sampled_from(["\n", "\r\n"])
)
_json = _lists.map(lambda texts: json.dumps([{"text": text} for text in texts]).encode())
_kinds = st.one_of(
    st.tuples(st.sampled_from([".txt", ".md", ".py"]), _plain),
    st.tuples(st.just(".jsonl"), _jsonl),
    st.tuples(st.just(".json"), _json),
    st.tuples(st.just(".csv"), _lists.map(lambda texts: _csv(texts).encode())),
    st.tuples(st.just(".parquet"), st.lists(st.one_of(_texts, st.none()), max_size=7).map(_table)),
    st.tuples(st.just(".txt.gz"), _plain.filter(lambda data: len(data) > 4).map(_gzip)),
    st.tuples(st.just(".jsonl.gz"), _jsonl.map(_gzip)),
    st.tuples(st.just(".bin"), st.just(bytes(range(256)))),
)
_files = st.lists(st.tuples(st.sampled_from(["", "a/", "b/", "b/c/"]), _kinds), min_size=1, max_size=8)


def write(folder: Path, files: list[tuple[str, tuple[str, bytes]]]) -> Path:
    """The drawn files, and a few good ones, so that something can be trained on and held out."""
    for number in range(6):
        files = [*files, (f"{'ab'[number % 2]}/", (".txt", prose(100 + number, 60).encode()))]
    for number, (where, (suffix, data)) in enumerate(files):
        path = folder / f"{where}{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def texts_and_ids(folder: Path) -> tuple[Counter[str], dict[str, list[int]]]:
    """How often each text is in the streams of a folder, and its ids; of one whose end is held out, no ids."""
    tokenizer, parts = load_tokenizer(folder / "tokenizer"), defaultdict(list)
    documents = pq.read_table(folder / "documents.parquet").to_pylist()
    for split in ("train", "holdout"):
        ids, at = np.load(folder / f"{split}.npy"), 0
        for one in (one for one in documents if one["split"] == split):
            name = one.get("id") or one["name"].removesuffix(" (cut)")
            parts[name].append(ids[at + 1 : at + one["length"] - 1].tolist())
            at += one["length"]
        assert at == len(ids)
    joined = {name: "".join(map(tokenizer.decode, of)) for name, of in parts.items()}
    return Counter(joined.values()), {joined[name]: of[0] for name, of in parts.items() if len(of) == 1}


def refused(summary: dict[str, Any]) -> dict[str, Counter[str]]:
    """Files and documents by reason.

    A file that nothing stays of counts under the first of its reasons: a recipe meets these in the order of the file, a
    build in that of its stages. An empty file in a compressed one is known as such to builds alone.
    """
    files, documents = Counter[str](), Counter[str]()
    for reason, one in summary["refused"].items():
        of_documents = "a reason of documents" if one["documents"] else reason
        files[NOTHING if reason == EMPTY else of_documents] += one["files"]
        documents[reason] += one["documents"]
    return {"files": +files, "documents": +documents}


_NUL, _MARKED = "one\0two".encode("utf-32"), "\ufeffone".encode("utf-16")


@example(files=[("", (".txt", _NUL)), ("", (".txt.gz", _gzip(_NUL)))])
@example(files=[("", (".txt", _MARKED)), ("a/", (".txt.gz", _gzip("\ufeff".encode("utf-8-sig"))))])
@example(files=[("", (".jsonl.gz", _gzip(b"{no"))), ("", (".jsonl", b"{no"))])
@given(files=_files)
@examples(10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_ids_and_reasons_are_the_same(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("both")
    source = write(root / "in", files)
    recipe = prepare(str(source), seq_len=64, vocab_size=300, holdout=0.2, max_bytes=0, cache_dir=str(root / "cache"))
    tokenizer = recipe.tokenizer_folder
    built = build(settings(source, **SAME, tokenizer={"path": str(tokenizer)}), root / "out")["summary"]

    texts, ids = texts_and_ids(tokenizer.parent)
    built_texts, built_ids = texts_and_ids(root / "out" / "tokens")
    assert built_texts == texts
    whole = ids.keys() & built_ids.keys()
    assert {text: ids[text] for text in whole} == {text: built_ids[text] for text in whole}

    found = [refused(summary) for summary in (built, recipe.summary)]
    assert found[0]["documents"] == found[1]["documents"]
    assert built["read"]["documents"] == recipe.summary["read"]["documents"]
    if DUPLICATE not in built["refused"]:  # which of two equal texts stays decides which file is used
        assert found[0]["files"] == found[1]["files"]
        assert built["read"]["files"] == recipe.summary["read"]["files"]
    for summary in (built, recipe.summary):  # a rejected row weighs its line in a build, its text in a recipe
        assert summary["read"]["text_bytes"]["used"] == sum(len(text.encode()) * n for text, n in texts.items())

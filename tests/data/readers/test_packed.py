"""Notebooks, .docx, EPUB and web archives: their text, and nothing that one could do to the machine."""

import gzip
import io
import json
import zipfile

import pytest

from tests.data.readers.made import TEXT, one, read, refusal, rows_bytes, zip_bytes
from tests.data.readers.packed import answer, docx_bytes, epub_bytes, notebook_bytes, page, warc_bytes, warc_record
from tilewright.data.readers.file_kinds import KINDS, kind_of
from tilewright.data.readers.limits import ReadLimits, ReadOptions

MAKE = {"a.ipynb": notebook_bytes, "a.docx": docx_bytes, "a.epub": epub_bytes, "a.warc": warc_bytes}


def write(path, data):
    path.write_bytes(data)
    return path


def test_notebook(tmp_path):
    record = one(write(tmp_path / "a.ipynb", notebook_bytes()))
    assert record.text == "# Title\nSome words.\n\n```python\nx = 1\nprint(x)\n```"
    old = {"worksheets": [{"cells": [{"cell_type": "code", "input": ["y = 2"]}]}], "cells": []}
    assert "y = 2" in one(write(tmp_path / "b.ipynb", json.dumps(old).encode())).text
    for bad in (b"{", b"[1]", b'{"cells": 3}', b'{"a": 1}', b"[" * 100_000, b"\xff\xfe\x00"):
        found = refusal(write(tmp_path / "c.ipynb", bad))
        assert found.rule in ("damaged notebook", "blank record"), found


def test_word_document(tmp_path):
    record = one(write(tmp_path / "a.docx", docx_bytes()))
    assert record.text == "First paragraph.\nSecond café.\na \tb\nkept"
    assert record.facts["title"] == "The title"


def test_chapters_of_a_book_come_in_its_order(tmp_path):
    records, rejects = read(write(tmp_path / "a.epub", epub_bytes()))
    assert not rejects
    found = [(r.part, r.text, r.facts["title"]) for r in records]
    assert found == [("chapter 1", "Chapter two.", "A book"), ("chapter 2", "Chapter one.", "A book")]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "noname"])
def test_web_archive(name, tmp_path):
    data = warc_bytes()
    if name.endswith(".gz"):  # a member per record, as crawlers write it
        data = b"".join(gzip.compress(b"WARC/1.0" + part) for part in data.split(b"WARC/1.0")[1:])
    records, rejects = read(write(tmp_path / name, data))
    found = {r.part.rpartition(" > ")[2]: r.text for r in records}
    assert found == {
        "http://a/1": "Page one.",
        "http://a/2": "In gzip.",
        "http://a/3": "In chunks.",
        "http://a/6": "Plain café text.",
    }
    assert sorted((r.rule, r.count) for r in rejects) == [
        ("answer without a page", 1),
        ("file type is not read", 1),
        ("record of a WARC that is no page", 2),
    ]


def test_a_truncated_web_archive_gives_what_comes_before(tmp_path):
    data = warc_bytes()
    records, rejects = read(write(tmp_path / "a.warc", data[: data.index(b"http://a/2") + 90]))
    assert [r.text for r in records] == ["Page one."]
    assert any("truncated" in r.rule or "damaged" in r.rule for r in rejects)


@pytest.mark.parametrize("kind", ["docx", "epub"])
def test_bombs(kind, tmp_path):
    """A member that expands a thousand times, and entities in entities."""
    name = "word/document.xml" if kind == "docx" else "META-INF/container.xml"
    path = write(tmp_path / f"a.{kind}", zip_bytes({name: b"<a>" + b" " * (64 << 20) + b"</a>"}))
    assert refusal(path, limits=ReadLimits(document_bytes=1 << 20)).rule == "text of a document in bytes"
    laughs = b'<!DOCTYPE a [<!ENTITY b "ha">%s]><a>&b9;</a>' % b"".join(
        b'<!ENTITY b%d "%s">' % (i, b"&b%d;" % (i - 1) * 10 if i else b"&b;" * 10) for i in range(10)
    )
    assert refusal(write(path, zip_bytes({name: laughs}))).rule.startswith("damaged")
    outside = b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>'
    assert refusal(write(path, zip_bytes({name: outside}))).rule.startswith("damaged")


def test_a_bomb_in_a_web_archive(tmp_path):
    bomb = answer(gzip.compress(page("a" * (64 << 20))), Content_Encoding="gzip")
    records, rejects = read(write(tmp_path / "a.warc", warc_record("response", "http://a", bomb)))
    assert not records
    assert rejects[0].rule == "damaged answer in a WARC"


@pytest.mark.parametrize("name", MAKE)
def test_damaged(name, tmp_path):
    data = MAKE[name]()
    for cut in range(10, len(data), max(1, len(data) // 12)):
        records, rejects = read(write(tmp_path / name, data[:cut]))
        assert records or rejects
        assert rejects or name == "a.warc"


def test_an_encrypted_book(tmp_path):
    out = io.BytesIO(epub_bytes())
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("META-INF/encryption.xml", "<e><EncryptedData/></e>")
    assert refusal(write(tmp_path / "a.epub", out.getvalue())).rule == "encrypted EPUB"


def test_suffixes_that_are_chosen(tmp_path):
    rows = rows_bytes("jsonl")
    options = ReadOptions(suffixes={".dat": "jsonl", ".foo": "text", ".txt": "none", ".docx": "none"})
    assert len(read(write(tmp_path / "a.dat", rows), options=options)[0]) == 2
    assert one(write(tmp_path / "a.foo", TEXT.encode()), options=options).text == TEXT
    for name in ("a.txt", "a.docx"):
        found = refusal(write(tmp_path / name, docx_bytes() if "docx" in name else TEXT.encode()), options=options)
        assert found.rule == "file type is not read"
    assert read(write(tmp_path / "b.foo", gzip.compress(TEXT.encode())), options=options)[0], "its first bytes go first"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b'{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        (b'[{"text": "a"}]', "json"),
        (b"all: build\n\tmake x\n", "text"),
        (b"<!doctype html><p>a", "html"),
        (b"%PDF-1.7", "pdf"),
        (b"{ not a row\n", "text"),
        (b"[section]\nkey = 1", "text"),
    ],
)
def test_a_file_without_a_suffix_is_what_it_holds(head, kind):
    assert kind_of("Makefile", head) == kind


def test_kinds_that_a_setting_may_name():
    assert {"text", "markdown", "html", "jsonl", "notebook", "docx", "epub", "warc", "none"} <= set(KINDS)
    assert not [kind for kind in KINDS if kind.startswith(".")]


@pytest.mark.parametrize("tag", ["form", "nav", "aside", "footer", "header", "div", "main", "article"])
def test_a_page_that_is_in_one_element(tag, tmp_path):
    around = f"<{tag}><p>{'The words of a page. ' * 9}</p><aside>Search <input></aside><footer>Imprint</footer></{tag}>"
    record = one(write(tmp_path / "a.html", f"<html><body>{around}</body></html>".encode()))
    assert record.text == ("The words of a page. " * 9).strip()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "csv"])
def test_a_row_that_is_too_long(kind, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["short", "x" * 5000, "é" * 3000, "also short"]
    path = tmp_path / f"a.{kind}"
    table = pa.table({"text": texts})
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    else:
        path.write_text("text,n\n" + "".join(f"{text},1\n" for text in texts))
    records, rejects = read(path, limits=ReadLimits(line_bytes=4096))
    assert {r.rule for r in rejects} == {"line length"}
    assert all(len(r.text.encode()) <= 4096 for r in records)
    assert kind == "csv" or [r.text for r in records] == ["short", "also short"]


def test_lists_that_are_no_rows(tmp_path):
    path = tmp_path / "package.json"
    path.write_text(
        json.dumps({"name": "x", "files": ["a.js", "b.js"], "rows": [{"text": "A row."}], "ids": [1, 2, 3]})
    )
    records, (reject,) = read(path)
    assert [r.text for r in records] == ["A row."]
    assert (reject.rule, reject.count) == ("list of values in an object, not of rows", 5)
    path.write_text(json.dumps({"keywords": ["one", "two"]}))
    assert refusal(path).count == 2
    path.write_text(json.dumps(["A text.", "Another one."]))
    assert len(read(path)[0]) == 2

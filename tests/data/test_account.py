"""What was read is what was used and what was refused: in files, documents and bytes, whatever a folder holds."""

import bz2
import csv
import io
import json
import lzma
import os
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.data.fuzz_data import content, entries, problem_of, run_case
from tests.data.conftest import write_text
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.common.progress import ProgressBar
from tilewright.data.common.records import LIMIT
from tilewright.data.common.tokenizer import LONGEST_WORD, short_words, train_tokenizer
from tilewright.data.corpus.read import collect
from tilewright.data.dataset.account import account_line
from tilewright.data.prepare import prepare
from tilewright.data.sources.find_files import find_files
from tilewright.data.sources.source_parts import printable
from tilewright.data.sources.user_files import user_source


def read(root, tmp_path, max_bytes=0, domains=()):
    """(texts, rejects as {(file, reason): count}, summary) of a path."""
    source = user_source(str(root))
    spool = collect(source, tmp_path / "spool", domains=domains, max_bytes=max_bytes, seed=0, progress=ProgressBar("t"))
    data = spool.data()
    texts = [spool.text(data, i) for i in range(len(spool))]
    return texts, {(r.path, r.rule): r.count for r in spool.rejects}, spool.account.summary()


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    (root / "good.txt").write_text(write_text(1, 60))
    return root


@pytest.mark.hypothesis
@examples(60)
@given(
    files=st.lists(st.integers(0, 10**9), max_size=5),
    names=st.lists(st.binary(min_size=1, max_size=30).filter(lambda b: b not in (b".", b"..")), min_size=5, max_size=5),
    max_bytes=st.sampled_from([0, 80, 5000]),
)
def test_found_is_used_and_refused(tmp_path_factory, files, names, max_bytes):
    """Any content under any name. The independent count is `os.walk`'s; the bytes on disk are `os.stat`'s."""
    tmp_path = tmp_path_factory.mktemp("account")
    root = os.fsencode(tmp_path / "data")
    os.mkdir(root)
    with open(os.path.join(root, b"good.txt"), "w") as file:
        file.write("good")
    for seed, name in zip(files, names, strict=False):
        suffix, data = content(random.Random(seed))
        name = name.replace(b"/", b"_").replace(b"\0", b"_") + suffix.encode()
        with open(os.path.join(root, name), "wb") as file:
            file.write(data)
    with suppress(DataError if max_bytes else ()):  # a limit that the first document does not fit into
        _check_account(tmp_path, root, max_bytes)


def _check_account(tmp_path, root, max_bytes):
    texts, _, summary = read(tmp_path / "data", tmp_path, max_bytes)
    assert problem_of(summary, entries(tmp_path / "data")) is None
    visible = [name for name in os.listdir(root) if not name.startswith(b".")]
    on_disk = sum(os.stat(os.path.join(root, name)).st_size for name in visible)
    assert summary["read"]["file_bytes"]["found"] == on_disk
    assert summary["read"]["documents"]["used"] == len(texts)
    assert summary["read"]["text_bytes"]["used"] == sum(len(text.encode()) for text in texts)
    json.dumps(summary, ensure_ascii=False).encode("utf-8")
    assert account_line(summary).isprintable()


@pytest.mark.parametrize("seed", range(40))
def test_quick_fuzz(seed, tmp_path):
    """The first cases of benchmarks/data/fuzz_data.py."""
    run_case(seed, tmp_path)


@examples(200)
@given(st.binary(max_size=12), st.binary(max_size=12))
def test_printable_names_are_utf8_and_different(one, two):
    shown = [printable(os.fsdecode(name)) for name in (one, two)]
    assert all(text.isprintable() for text in shown)
    assert (shown[0] == shown[1]) == (one == two)


def test_each_reason_has_its_numbers(folder, tmp_path):
    text = write_text(5, 300)
    (folder / "same.txt").write_text(write_text(1, 60))
    (folder / "image.png").write_bytes(b"x" * 1000)
    (folder / "rows.jsonl").write_bytes(b'{"text": 1}\n' + json.dumps({"text": text}).encode() + b"\n")
    _, _, summary = read(folder, tmp_path)
    size = len(write_text(1, 60).strip("\n"))
    assert summary["refused"]["exact duplicate"]["documents"] == 1
    assert summary["refused"]["exact duplicate"]["text_bytes"] == size
    assert summary["refused"]["exact duplicate"]["files"] == 1
    assert summary["refused"]["file type is not read"]["file_bytes"] == 1000
    assert summary["file_types_not_read"] == {".png": {"files": 1, "file_bytes": 1000}}
    row = summary["refused"]["field 'text' is not text"]
    assert (row["files"], row["documents"], row["text_bytes"], row["examples"]) == (0, 1, 12, "rows.jsonl")
    assert summary["read"]["files"] == {"found": 4, "used": 2, "refused": 2}
    assert summary["read"]["documents"] == {"found": 4, "used": 2, "refused": 2}
    line = account_line(summary)
    assert line.startswith("4 files, ")
    assert "2 used" in line
    assert "file type is not read: .png (1 file, 1000 B)" in line


def test_what_a_limit_leaves_is_counted(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    texts = [write_text(i, 100) for i in range(40)]
    for i, text in enumerate(texts):
        (root / f"{i}.txt").write_text(text)
    used, _, summary = read(root, tmp_path, max_bytes=4000)
    limit = summary["refused"][LIMIT]
    assert summary["read"]["files"]["used"] == len(used)
    assert limit["files"] == 40 - len(used)
    assert summary["read"]["file_bytes"]["found"] == sum(map(len, texts))


def test_the_line_is_said_and_kept(folder, tmp_path):
    (folder / "more.txt").write_text(write_text(3, 90))
    (folder / "x.bin").write_bytes(b"12345")
    prepared = prepare(str(folder), seq_len=16, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    assert prepared.summary["read"]["files"] == {"found": 3, "used": 2, "refused": 1}
    again = prepare(str(folder), seq_len=16, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    assert account_line(again.summary) == account_line(prepared.summary)


# ---- kinds of files ----


@pytest.mark.parametrize("shape", ["array", "texts", "object", "lines", "one", "nested"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json(folder, tmp_path, shape, encoding):
    rows = [
        {"id": i, "text": f'row {i}: naïve 漢字 🦊 " [ {{ ,' + " word" * i, "tags": ["a", {"b": [1]}]} for i in range(9)
    ]
    whole = {
        "array": json.dumps(rows, indent=1),
        "texts": json.dumps([row["text"] for row in rows], ensure_ascii=False),
        "object": json.dumps({"version": {"list": [1]}, "data": rows}),
        "lines": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "one": json.dumps(rows[0], indent=2),
        "nested": json.dumps([rows[0], [1], {"text": None}, *rows[1:]]),
    }[shape]
    (folder / "x.json").write_bytes(whole.encode(encoding))
    texts, rejects, _ = read(folder, tmp_path)
    wanted = {row["text"] for row in (rows[:1] if shape == "one" else rows)}
    if shape == "lines" and encoding in ("utf-16", "utf-32"):
        pytest.skip("lines of rows are told from one object by the first line, in UTF-8")
    assert set(texts) - {write_text(1, 60).strip("\n")} == wanted
    assert sum(rejects.values()) == (2 if shape == "nested" else 0)


@examples(50)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=8), st.integers(1, 9)
)
def test_rows_of_an_array_in_pieces_of_any_size(texts, step):
    """However an array comes in pieces, its items are those that `json` reads."""
    from tilewright.data.sources.file_lines import LONGEST_LINE
    from tilewright.data.sources.json_rows import _items

    whole = json.dumps([{"text": text, "more": [text, {"a": 1}]} for text in texts], ensure_ascii=False)
    pieces = iter([whole[i : i + step] for i in range(0, len(whole), step)])
    assert [json.loads(item)["text"] for item in _items("", pieces, 1, LONGEST_LINE)] == texts


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_csv_is_what_the_csv_module_reads(folder, tmp_path, delimiter):
    fields = ["plain", 'with "quotes"', "with\nlines", "with, comma\tand tab", "naïve 漢字", "x" * 300_000, "last"]
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(["id", "text", "n"])
    for i, field in enumerate(fields):
        writer.writerow([i, field, 1])
    data = (
        out.getvalue().encode() + f"8{delimiter}caf".encode() + b"\xe9" + f"{delimiter}1\n9\n".encode() + b"caf\xe9\n"
    )
    (folder / ("x.csv" if delimiter == "," else "x.tsv")).write_bytes(data)
    texts, rejects, _ = read(folder, tmp_path)
    assert {field for field in fields if len(field) < 100} <= set(texts)
    pieces = sorted(len(text) for text in texts if set(text) == {"x"})
    assert pieces == [300_000 % 65_536, 65_536]  # the other pieces are duplicates
    assert {reason: count for (_, reason), count in rejects.items()} == {
        "row is not UTF-8": 1,
        "row with another number of fields": 2,
    }


def test_csv_without_the_column_names_those_that_there_are(folder, tmp_path):
    (folder / "x.csv").write_text("id,body\n1,a\n")
    source = user_source(str(folder / "x.csv"))
    (reject,) = [item for part in source.parts for item in part.read()]
    assert (reject.rule, reject.value) == ("no field 'text'", "fields: id, body")


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
def test_other_compressions(folder, tmp_path, suffix):
    pack = lzma.compress if suffix == ".xz" else bz2.compress
    rows = [json.dumps({"text": write_text(i, 40)}).encode() + b"\n" for i in range(20)]
    (folder / f"x.jsonl{suffix}").write_bytes(pack(b"".join(rows[:10])) + pack(b"".join(rows[10:])))
    (folder / f"cut.txt{suffix}").write_bytes(pack(write_text(77, 9000).encode())[:-20])
    (folder / f"bomb.txt{suffix}").write_bytes(pack(b"a" * (32 << 20)))
    texts, rejects, _ = read(folder, tmp_path)
    assert {write_text(i, 40).strip("\n") for i in range(20)} <= set(texts)
    assert {(where, reason.split(",")[0]) for where, reason in rejects} == {
        (f"cut.txt{suffix}", "truncated compressed file"),
        (f"bomb.txt{suffix}", "expands to more than 256 times its size"),
    }


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_long_text_in_a_wide_encoding(folder, tmp_path, encoding):
    text = "".join(write_text(i, 2000) for i in range(60))
    (folder / "x.txt").write_bytes(text.encode(encoding))
    texts, rejects, _ = read(folder, tmp_path)
    assert not rejects
    assert sum(map(len, texts)) > 0.99 * len(text)


def test_deep_json_is_refused_alone(folder, tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    good = json.dumps({"text": "good row"})
    (folder / "x.jsonl").write_text(f'{good}\n{{"text": {deep}}}\n{json.dumps({"text": "another"})}\n')
    (folder / "y.json").write_text(f"[{json.dumps({'text': 'third'})}, {deep}, {json.dumps({'text': 'fourth'})}]")
    texts, rejects, _ = read(folder, tmp_path)
    assert {"good row", "another", "third", "fourth"} <= set(texts)
    assert rejects == {("x.jsonl", "JSON nested too deep"): 1, ("y.json", "JSON nested too deep"): 1}


def test_nul_characters_are_removed_and_said(folder, tmp_path):
    (folder / "x.jsonl").write_text(json.dumps({"text": "before\0after"}) + "\n")
    texts, _, summary = read(folder, tmp_path)
    assert "beforeafter" in texts
    assert summary["changed"] == {"NUL characters removed": 1}


# ---- links and names ----


def test_links_are_followed_once(folder, tmp_path):
    (folder / "real").mkdir()
    (folder / "real" / "a.txt").write_text(write_text(2, 50))
    (folder / "again").symlink_to(folder / "real")
    (folder / "real" / "up").symlink_to(folder)
    (folder / "copy.txt").symlink_to(folder / "good.txt")
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "b.txt").write_text(write_text(3, 50))
    (outside / "deep" / "loop").symlink_to(outside)
    (folder / "other").symlink_to(outside)
    (folder / "parent").symlink_to(tmp_path)
    (folder / "far.txt").symlink_to(outside / "deep" / "b.txt")
    texts, rejects, summary = read(folder, tmp_path / "..")
    assert len(texts) == 2
    assert {where: reason for where, reason in rejects} == {
        "again": "link to a folder that is read already",
        "copy.txt": "link to a file that is read already",
        "other": "link out of the source",
        "far.txt": "link out of the source",
        "parent": "link to a folder that it is in",
        "real/up": "link to a folder that is read already",
    }
    assert summary["read"]["files"] == {"found": 8, "used": 2, "refused": 6}


def test_a_snapshot_of_the_hub_is_links_into_its_cache(tmp_path):
    """A cached repository: its files are links to blobs beside the snapshot, and are read."""
    cached = tmp_path / "datasets--org--name"
    (cached / "blobs").mkdir(parents=True)
    (cached / "snapshots" / "abc").mkdir(parents=True)
    for i in range(6):
        (cached / "blobs" / f"{i}").write_text(write_text(i, 80))
        (cached / "snapshots" / "abc" / f"{i}.txt").symlink_to(f"../../blobs/{i}")
    (tmp_path / "far.txt").write_text(write_text(9, 80))
    (cached / "snapshots" / "abc" / "far.txt").symlink_to(tmp_path / "far.txt")
    found = find_files(cached / "snapshots" / "abc")
    assert len(found.files) == 6
    assert [(reject.path, reject.rule) for reject in found.rejects] == [("far.txt", "link out of the source")]


@pytest.mark.parametrize("name", [b"caf\xe9", b"new\nline", b"\x1b[31m", b"back\\slash", b"\xff" * 50])
def test_any_name_all_the_way(name, tmp_path):
    root = os.fsencode(tmp_path / "data")
    os.makedirs(os.path.join(root, name))
    for i in range(6):
        with open(os.path.join(root, name, name + str(i).encode() + b".txt"), "w") as file:
            file.write(write_text(i, 80))
    prepared = prepare(str(tmp_path / "data"), seq_len=16, vocab_size=300, cache_dir=str(tmp_path / "cache"))
    assert prepared.domains == (printable(os.fsdecode(name)),)
    assert prepared.describe_row(prepared.domains[0], 0)[0]["name"].startswith(prepared.domains[0] + "/")
    again = prepare(os.fsdecode(os.path.join(root, name)), seq_len=16, vocab_size=300, cache_dir=str(tmp_path / "c"))
    assert again.summary["read"]["files"]["used"] == 6


def test_a_file_that_changes_is_said(folder, tmp_path):
    source = user_source(str(folder))
    (folder / "good.txt").write_text(write_text(1, 70))
    spool = collect(source, tmp_path / "spool", domains=(), max_bytes=0, seed=0, progress=ProgressBar("test"))
    assert [(r.path, r.rule) for r in spool.rejects] == [("good.txt", "file changed while it was read")]


# ---- texts without spaces ----


@examples(60)
@given(
    st.lists(st.sampled_from(["漢", "a", "-", "_", " ", "\n", "1", "é", "\u0301"]), max_size=12), st.integers(1, 400)
)
def test_no_long_word_is_trained_on(kinds, times):
    """Compared with the words that the tokenizer itself makes."""
    text = "".join(kind * times for kind in kinds)
    pieces = list(short_words([text]))
    assert "".join(pieces) == text
    split = train_tokenizer(["a"], 300).backend.pre_tokenizer
    longest = max((b - a for piece in pieces for _, (a, b) in split.pre_tokenize_str(piece)), default=0)
    assert longest <= 2 * LONGEST_WORD + 1

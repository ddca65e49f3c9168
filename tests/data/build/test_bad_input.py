"""Bad input: torn, hostile and odd files come out as rejects, and the rest as always. No traceback, no hang."""

import gzip
import json
import os
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.build.corpora import build, prose, settings
from tests.data.readers.made import HTML, pdf_bytes
from tests.data.readers.packed import docx_bytes
from tilewright.core.errors import HardwareError

GOOD = 12


@pytest.fixture
def folder(tmp_path) -> Path:
    """A dozen good texts, which must all be in the dataset whatever lies beside them."""
    source = tmp_path / "in"
    source.mkdir()
    for i in range(GOOD):
        (source / f"good{i:02}.txt").write_text(prose(i))
    return source


def outcome(source: Path, out: Path, **sections) -> dict[str, set[str]]:
    """Reasons by file; all good texts are there."""
    build(settings(source, **sections), out)
    kept = {row["path"] for row in pq.read_table(out / "records").to_pylist()}
    assert {f"good{i:02}.txt" for i in range(GOOD)} <= kept
    found: dict[str, set[str]] = {}
    for row in pq.read_table(out / "rejects").to_pylist():
        found.setdefault(row["path"], set()).add(row["rule"])
    return found


def test_damaged_files(folder, tmp_path):
    whole = gzip.compress(prose(100, 5000).encode())
    (folder / "torn.txt.gz").write_bytes(whole[: len(whole) // 2])
    pq.write_table(pa.table({"text": [prose(i) for i in range(200, 240)]}), folder / "torn.parquet")
    data = (folder / "torn.parquet").read_bytes()
    (folder / "torn.parquet").write_bytes(data[: len(data) // 2])
    (folder / "half.jsonl").write_text(json.dumps({"text": prose(300)}) + '\n{"text": "half a li')
    (folder / "nul.txt").write_bytes(b"\0\1\2" * 500)
    (folder / "surrogate.jsonl").write_text('{"text": "half of a pair: \\ud800 and more"}\n')
    (folder / "bomb.txt.gz").write_bytes(gzip.compress(b"0" * (64 << 20)))
    found = outcome(folder, tmp_path / "out")
    for name in ("torn.txt.gz", "torn.parquet", "half.jsonl", "nul.txt", "surrogate.jsonl", "bomb.txt.gz"):
        assert found.get(name), f"{name} has no reject"
    assert found["surrogate.jsonl"] == {"half a Unicode surrogate pair"}
    assert found["half.jsonl"] == {"half-written last line"}


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.pdf", "pypdf"), ("a.html", "selectolax"), ("a.docx", "defusedxml"), ("k.txt", "charset_normalizer")],
)
def test_a_missing_package_fails_the_build_and_the_hint_mends_it(folder, tmp_path, monkeypatch, name, package):
    """Nothing is recorded as bad: with the package the same command reads the file."""
    koi8 = "Все счастливые семьи похожи друг на друга, каждая несчастливая несчастлива.\n".encode("koi8-r")
    made = {"a.pdf": pdf_bytes(["One page"]), "a.html": HTML.encode(), "a.docx": docx_bytes(), "k.txt": koi8}
    (folder / name).write_bytes(made[name])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, package, None)
        with pytest.raises(HardwareError, match=f"Package {package} is not installed") as caught:
            build(settings(folder), tmp_path / "out")
        problem = caught.value.problems[0]
        assert all((problem.got, problem.need, problem.try_))
        assert name in problem.got
        assert ("suffixes" in problem.try_) == (name != "k.txt")
        if name != "k.txt":  # or without such files
            assert f'suffixes = {{ "{Path(name).suffix}" = "none" }}' in problem.try_
            left_out = {"suffixes": {Path(name).suffix: "none"}}
            assert outcome(folder, tmp_path / "other", read=left_out)[name] == {"file type is not read"}
    assert not outcome(folder, tmp_path / "out").get(name)


def test_endless_lines(folder, tmp_path):
    (folder / "rows.jsonl").write_text(
        json.dumps({"text": "x" * 90_000}) + "\n" + json.dumps({"text": prose(50)}) + "\n"
    )
    (folder / "big.txt").write_text(prose(51) + "y " * 90_000 + "\n" + prose(52))
    found = outcome(folder, tmp_path / "out", limits={"line_bytes": 4096})
    assert any("line" in rule for rule in found["rows.jsonl"])
    assert found["big.txt"] == {"line length"}
    texts = [row["text"] for row in pq.read_table(tmp_path / "out" / "records").to_pylist()]
    assert prose(50).strip() in texts
    assert any(prose(51).strip() in text for text in texts)


def test_odd_folders(folder, tmp_path):
    (folder / "sub").mkdir()
    (folder / "sub" / "loop").symlink_to(folder)
    (folder / "broken").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.txt")
    (folder / "caf\udce9.txt").write_bytes(prose(60).encode())
    found = outcome(folder, tmp_path / "out")
    assert found["sub/loop"] == {"link to a folder that is read already"}
    assert found["broken"] == {"cannot be read"}
    assert found["pipe.txt"] == {"not a regular file"}
    assert "caf\\xe9.txt" in {row["path"] for row in pq.read_table(tmp_path / "out" / "records").to_pylist()}


def test_domains_that_are_empty_or_too_small(folder, tmp_path):
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").write_text("\n\n")
    (folder / "small").mkdir()
    (folder / "small" / "b.txt").write_text("a few words")
    found = outcome(folder, tmp_path / "out")
    assert found["empty/a.txt"] == {"blank record"}
    assert found["small/b.txt"] == {"domain too small to hold a part out"}


def test_long_texts_are_cut_with_their_places(folder, tmp_path):
    long = "".join(prose(500 + i) + "\n" for i in range(60))
    (folder / "long.txt").write_text(long)
    outcome(folder, tmp_path / "out", read={"max_chars": 10_000})
    mine = [row for row in pq.read_table(tmp_path / "out" / "records").to_pylist() if row["path"] == "long.txt"]
    mine.sort(key=lambda row: row["start"])
    assert len(mine) >= len(long) // 10_000
    assert mine[0]["start"] == 0
    assert mine[-1]["stop"] == len(long)
    for row, after in zip(mine, [*mine[1:], None], strict=True):
        assert long[row["start"] : row["stop"]].strip("\n") == row["text"]
        assert after is None or after["start"] == row["stop"]


def fuzz(folder: Path, out: Path, num: int, seed: int) -> None:
    """`num` files: good ones of every kind with bytes changed, cut off or put in, under any suffix."""
    rng = random.Random(seed)
    table = folder / "seed.parquet"
    pq.write_table(pa.table({"text": [prose(2000 + i, 40) for i in range(20)]}), table)
    rows = "".join(json.dumps({"text": prose(2000 + i, 40)}) + "\n" for i in range(20)).encode()
    seeds = [
        prose(1000).encode(),
        rows,
        gzip.compress(rows),
        table.read_bytes(),
        b'text,n\n"a, b",1\n' * 40,
        b"",
    ]
    table.unlink()
    suffixes = (".txt", ".jsonl", ".jsonl.gz", ".parquet", ".csv", ".json", ".arrow", ".txt.zst", ".md.xz", "", ".bin")
    for i in range(num):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randrange(8)):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[at:at] = rng.randbytes(rng.randrange(1, 40))
                case 1:
                    del data[at:]
                case 2:
                    data[at : at + 1] = rng.randbytes(1)
                case 3:
                    del data[at : at + rng.randrange(1, 40)]
        (folder / f"fuzz{i:05}{rng.choice(suffixes)}").write_bytes(data)
    found = outcome(folder, out)
    assert sum(map(len, found.values())) > num // 10


def test_fuzzed_files(folder, tmp_path):
    fuzz(folder, tmp_path / "out", 300, 1)


@pytest.mark.slow
def test_ten_thousand_fuzzed_files(folder, tmp_path):
    fuzz(folder, tmp_path / "out", 10_000, 2)

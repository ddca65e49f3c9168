"""A large file gives the same text and loses the same bytes however many units read it."""

import json
import os
import random
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.data.build.corpora import prose, settings
from tilewright.data.common.records import Record
from tilewright.data.engine.build_files import list_inputs
from tilewright.data.sources.content_hash import Contents
from tilewright.data.stages.read_records import read_item

SMALL, LARGE = 1 << 16, 1 << 24
LATIN = "Le café coûte très cher à Besançon, où l'été dure à peine un mois.\n"


def _lines(seed: int, num_words: int = 30_000) -> str:
    return prose(seed, num_words).replace(". ", ".\n")


def _late(text: str, line: bytes, rng: random.Random) -> bytes:
    """`text` with `line` put between two of its lines, behind the first 64 KiB."""
    data = text.encode()
    at = data.index(b"\n", rng.randrange(70_000, 100_000)) + 1
    return data[:at] + line + data[at:]


def _cases(rng: random.Random) -> dict[str, bytes]:
    text = _lines(rng.randrange(1000))
    accents = "".join(line + LATIN for line in text.splitlines(keepends=True))
    page = "<html><head><title>t</title></head><body>" + "".join(f"<p>{one}</p>\n" for one in text.split("\n"))
    rows = [json.dumps({"text": line + LATIN}, ensure_ascii=rng.random() < 0.5) for line in text.split("\n\n")]
    return {
        "utf8.txt": accents.encode(),
        "latin.txt": accents.encode("latin-1"),
        "latin_late.txt": _late(text, LATIN.encode("latin-1"), rng),
        "mojibake_late.txt": _late(text, LATIN.encode().decode("cp1252").encode(), rng),
        "utf16.txt": text.encode("utf-16"),
        "utf16le.txt": accents.encode("utf-16-le"),
        "binary_late.txt": _late(text, bytes(range(256)) + b"\n", rng),
        "front.md": b"---\ntitle: x\n---\n" + accents.encode(),
        "page.html": page.encode(),
        "rows.jsonl": "\n".join(rows).encode(),
        "rows_latin.jsonl": "\n".join(json.dumps({"text": one}, ensure_ascii=False) for one in accents.split("\n\n"))
        .encode("latin-1"),
    }  # fmt: skip


def _read(root: Path, shard_bytes: int) -> dict[str, tuple[str, Counter[str]]]:
    config = settings(root, read={"shard_bytes": shard_bytes})
    found: dict[str, tuple[str, Counter[str]]] = {}
    for item in (item for shard in list_inputs(config.read).shards for item in shard):
        text, lost = found.get(item.name, ("", Counter()))
        for one in read_item(item, config):
            if isinstance(one, Record):
                text += one.text
            else:
                lost[one.rule] += one.num_bytes
        found[item.name] = text, lost
    return found


@pytest.mark.parametrize("seed", range(2))
def test_text_does_not_depend_on_the_size_of_shards(tmp_path, seed):
    cases = _cases(random.Random(seed))
    for name, data in cases.items():
        assert len(data) > SMALL, name
        (tmp_path / name).write_bytes(data)
    small, large = _read(tmp_path, SMALL), _read(tmp_path, LARGE)
    assert small.keys() == large.keys() == cases.keys()
    for name in cases:
        assert small[name][1] == large[name][1], name
        pairs = zip_longest(small[name][0].split("\n"), large[name][0].split("\n"))
        differ = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
        assert not differ[:1], f"{name}: {len(differ)} lines differ"
    assert LATIN in small["mojibake_late.txt"][0]
    assert "<p>" not in small["page.html"][0]


def test_contents_are_remembered_only_while_nothing_of_a_file_changed(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one")
    contents = Contents(tmp_path / "contents.json")
    first = contents.of(path, path.stat())
    contents.save()
    assert json.loads((tmp_path / "contents.json").read_bytes()) == {}, "just written: the next change may look alike"

    monkeypatch.setattr("tilewright.data.sources.content_hash._SETTLED_NS", -1)
    contents = Contents(tmp_path / "contents.json")
    contents.of(path, path.stat())
    contents.save()
    monkeypatch.setattr("tilewright.data.sources.content_hash.read_content", None)
    assert Contents(tmp_path / "contents.json").of(path, path.stat()) == first, "nothing is read"
    monkeypatch.undo()
    before = path.stat()
    other = tmp_path / "b.txt"
    other.write_text("two")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert Contents(tmp_path / "contents.json").of(path, path.stat()) != first

    (tmp_path / "contents.json").write_text('{"x": 3}')
    assert Contents(tmp_path / "contents.json").of(path, path.stat()) != first, "a damaged memory is no memory"

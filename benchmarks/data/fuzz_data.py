"""Data files of every kind, whole and damaged, through the real reading: no traceback, no hang, nothing uncounted.

Each case is a folder of a few generated files, links and pipes under odd names, read by `user_source` and `collect`, or
(one in fifty) by the whole of `prepare`. Checked: either a four-part DataError, or a summary in which found = used +
refused for files, documents and bytes, and in which every entry that `os.walk` sees is one file.

python -m benchmarks.data.fuzz_data --cases 10000
"""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import socket
from pathlib import Path
from typing import Any

from benchmarks.fuzz import drive

CLAIM = (
    "generated data files, whole and damaged, are used or refused with a reason: no traceback, no hang, none uncounted"
)
_WORDS = ["tile", "naïve", "漢字", "🦊", "a", "the", "\u2028", "ﬁ", "x" * 50, "\t", "=", '"', ",", "\\", "{", "[", "]"]

_STEMS = [
    *(b"plain", b"a@12", b"caf\xe9", b"\xff\xfe", "漢字".encode(), b"new\nline", b"\x1b[31m", b"-rf", b"%s{}", b" "),
    *(b"x" * 200, b"back\\slash", b".hidden", b"quote'\"", b"nbsp\xc2\xa0", "\u202e".encode(), b"\x80\x85"),
]


def text(rng: random.Random, most: int = 200) -> str:
    """Words with odd ones between them, in lines."""
    return "".join(rng.choice(_WORDS) + rng.choice([" ", " ", "\n", ""]) for _ in range(rng.randrange(most)))


def _value(rng: random.Random) -> Any:
    kinds = [None, 1.5, True, 10**400, float("nan"), "", "\ud800", "\0x", [], {}, text(rng, 20)]
    return rng.choice(kinds)


def _row(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.6:
        return json.dumps({"text": text(rng), "id": rng.random()}, ensure_ascii=rng.random() < 0.5)
    if draw < 0.7:
        deep = rng.choice([10, 900, 5000, 200_000])
        return rng.choice(["[" * deep + "]" * deep, '{"text": ' + '{"a":' * deep + "1" + "}" * deep + "}", "[" * deep])
    if draw < 0.8:
        return rng.choice(
            ["", "   ", "null", "{", "]", "[1, 2", '{"text"', "1" * 5000, '"text"', "\ufeff{}", "}{", ",,"]
        )
    return json.dumps({rng.choice(["text", "body", "x" * 300, "a\nb", "\ud800"]): _value(rng)})


def _jsonl(rng: random.Random) -> str:
    return rng.choice(["\n", "\n", "\r\n", "\n\n"]).join(_row(rng) for _ in range(rng.randrange(12)))


def _json(rng: random.Random) -> str:
    rows = [_row(rng) for _ in range(rng.randrange(8))]
    whole = rng.choice(
        ["[{}]", "[{}]", '{{"data": [{}], "n": 1}}', '{{"a": {{"b": [{}]}}}}', "{}", "[{},]", "[[{}]]", "[{}"]
    )
    return rng.choice(["", " \n", "\ufeff"]) + whole.format(rng.choice([",", ", \n"]).join(rows))


def _csv(rng: random.Random, delimiter: str) -> str:
    rows = ["id,text,more", "text", "id,body", "text,text", "", '"te""xt",text', "text,"][rng.randrange(7)] + "\n"
    for _ in range(rng.randrange(10)):
        field = text(rng, 20)
        quoted = '"' + field.replace('"', '""') + '"'
        rows += ",".join(
            rng.choice(["1", "", quoted, field, '"open', 'a"b"c', "x" * 70_000]) for _ in range(rng.randrange(1, 5))
        )
        rows += rng.choice(["\n", "\r\n", "\r"])
    return rows.replace(",", delimiter)


def _table(rng: random.Random, kind: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [rng.choice([text(rng), None, ""]) for _ in range(rng.randrange(40))]
    column = pa.array(texts, rng.choice([pa.string(), pa.large_string()]))
    if rng.random() < 0.2:
        column = pa.array(range(len(texts)))
    table = pa.table({rng.choice(["text", "text", "text", "body"]): column, "id": pa.array(range(len(texts)))})
    sink = io.BytesIO()
    if kind == "parquet":
        pq.write_table(
            table, sink, row_group_size=rng.choice([5, 1000]), compression=rng.choice(["zstd", "none", "gzip"])
        )
    else:
        make = rng.choice([pa.ipc.new_stream, pa.ipc.new_file])
        with make(sink, table.schema) as out:
            out.write_table(table)
    return sink.getvalue()


def _encoded(rng: random.Random, content: str) -> bytes:
    encoding = rng.choice(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-32", "latin-1", "utf-16-le", "cp1252", "utf-7"])
    return content.encode(encoding, rng.choice(["replace", "ignore", "backslashreplace"]))


def _damaged(rng: random.Random, data: bytes) -> bytes:
    draw = rng.random()
    if not data or draw < 0.6:
        return data
    if draw < 0.75:
        return data[: rng.randrange(len(data))]
    if draw < 0.9:
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(changed)
    return data + rng.choice([b"\0" * 100, b"more", data])


def _compressed(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    import zstandard

    if rng.random() < 0.05:
        fill = rng.choice([b"\0", b"a", b"\n", b"[", b'{"text": "a"}\n'])
        data = fill * ((6 << 20) // len(fill))
    suffix = rng.choice(["gz", "zst", "xz", "bz2"])
    if suffix == "gz":
        return ".gz", gzip.compress(data, 1)
    if suffix == "zst":
        return ".zst", zstandard.ZstdCompressor(level=1).compress(data)
    if suffix == "xz":
        return ".xz", lzma.compress(data, preset=0)
    return ".bz2", bz2.compress(data, 1)


def content(rng: random.Random) -> tuple[str, bytes]:
    """Suffix and bytes of one file."""
    kind = rng.choice(
        [".txt", ".md", ".jsonl", ".jsonl", ".json", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".bin", ""]
    )
    if kind in (".parquet", ".arrow"):
        data = _table(rng, kind[1:])
    elif rng.random() < 0.1:
        data = rng.randbytes(rng.choice([0, 1, 3, 100, 5000]))
    elif kind == ".jsonl":
        data = _encoded(rng, _jsonl(rng))
    elif kind == ".json":
        data = _encoded(rng, rng.choice([_json, _json, _jsonl])(rng))
    elif kind in (".csv", ".tsv"):
        data = _encoded(rng, _csv(rng, "," if kind == ".csv" else "\t"))
    else:
        data = _encoded(rng, text(rng) * rng.choice([1, 1, 1, 30]))
        if rng.random() < 0.1:
            data += b"\0" + data
    data = _damaged(rng, data)
    if rng.random() < 0.25:
        suffix, packed = _compressed(rng, data)
        return kind + suffix, _damaged(rng, packed)
    return kind, data


def _name(rng: random.Random, number: int) -> bytes:
    stem = rng.choice(_STEMS)
    return stem + str(number).encode()


def make_folder(rng: random.Random, root: Path) -> None:
    """Files, folders, links, pipes and sockets below `root`."""
    folders = [os.fsencode(root)]
    if rng.random() < 0.8:  # else nothing is usable, mostly, which is one error
        (root / "good.txt").write_text(text(rng) + "two documents at least")
        (root / "good.jsonl").write_text(json.dumps({"text": text(rng, 500) + "good"}) + "\n")
    for number in range(rng.randrange(1, 7)):
        here = rng.choice(folders)
        path = os.path.join(here, _name(rng, number))
        draw = rng.random()
        if draw < 0.15:
            os.mkdir(path)
            folders.append(path)
        elif draw < 0.25:
            target = rng.choice([*folders, b"absent", b".", b"..", path, os.fsencode(root / "plain0.txt")])
            os.symlink(target, path + rng.choice([b"", b".txt"]))
        elif draw < 0.28:
            os.mkfifo(path + b".txt")
        elif draw < 0.3 and len(path) < 90:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path)
        elif draw < 0.33:
            with open(os.path.join(here, rng.choice([b"state.json", b"dataset_dict.json"])), "w") as file:
                file.write(rng.choice(["{}", "[]", '{"_data_files": [{"filename": "../x\\u0000"}]}', "[" * 100_000]))
        else:
            suffix, data = content(rng)
            with open(path + suffix.encode(), "wb") as file:
                file.write(data)


def entries(root: Path) -> int:
    """Files below `root`, and whatever else is not a folder that is entered: links, pipes, hidden folders."""
    count = 0
    for _, folders, files in os.walk(os.fsencode(root)):
        count += len(files) + sum(f.startswith(b".") for f in folders)
        folders[:] = [f for f in folders if not f.startswith(b".")]
    return count


def problem_of(summary: dict[str, Any], found: int | None) -> str | None:
    """What does not add up, or None. `found`: entries that there are, None where links lead to more."""
    for name, numbers in summary["read"].items():
        refused = sum(entry[name] for entry in summary["refused"].values())
        if numbers["found"] != numbers["used"] + numbers["refused"] or refused != numbers["refused"]:
            return f"{name}: {numbers}, by reason {refused}"
    if found is not None and summary["read"]["files"]["found"] != found:
        return f"{summary['read']['files']['found']} files of {found}"
    if any(
        reason and not any(v for v in entry.values() if isinstance(v, int))
        for reason, entry in summary["refused"].items()
    ):
        return "a reason without a count"
    return None


def _checked(error: Any) -> str:
    """What an error of ours says first; it has all of its parts, fits a screen and can be printed."""
    assert all(p.what and p.got and p.need for p in error.problems), error
    assert len(str(error).splitlines()) <= 60, str(error)
    str(error).encode("utf-8")
    return error.problems[0].what


def run_case(seed: int, folder: Path) -> str:
    """Outcome of a case: "used", "error: ..." for a DataError of four parts.

    Raises:
        AssertionError: something does not add up. Anything else: a bug.
    """
    from tilewright.core.errors import DataError
    from tilewright.data.common.progress import ProgressBar
    from tilewright.data.corpus.read import collect
    from tilewright.data.dataset.account import account_line
    from tilewright.data.prepare import prepare
    from tilewright.data.sources.user_files import user_source

    rng = random.Random(seed)
    root = folder / "data"
    root.mkdir()
    make_folder(rng, root)
    links = any(
        os.path.islink(os.path.join(at, f)) for at, inner, files in os.walk(os.fsencode(root)) for f in inner + files
    )
    max_bytes = rng.choice([0, 0, 50, 3000])
    try:
        if seed % 50 == 0:
            summary = prepare(
                str(root), seq_len=16, vocab_size=300, max_bytes=max_bytes, cache_dir=str(folder / "cache")
            ).summary
        else:
            source = user_source(str(root))
            with ProgressBar("fuzz") as progress:
                spool = collect(source, folder / "spool", domains=(), max_bytes=max_bytes, seed=0, progress=progress)
            summary = {**spool.account.summary(), "rejects": [reject.__dict__ for reject in spool.rejects]}
            assert len(spool.data()) == summary["read"]["text_bytes"]["used"]
    except DataError as error:
        return f"error: {_checked(error)}"
    json.dumps(summary, ensure_ascii=False).encode("utf-8")
    line = account_line(summary)
    assert line.isprintable(), line
    wrong = problem_of(summary, None if links else entries(root))
    assert wrong is None, wrong
    return "used"


if __name__ == "__main__":
    drive("benchmarks.data.fuzz_data", CLAIM, run_case)

"""Small files that decompress to a lot: read in bounded memory, set aside with their numbers, never a crash."""

import gzip
import json
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.cover import covering, some
from tilewright.data.common.records import Record, Rejected
from tilewright.data.sources.user_files import user_source

ROOM = 100 << 20
"""Bytes over the baseline that reading a bomb may take."""
_SIZE = 160 << 20
_CHUNK = 1 << 20

FILL = {
    "zeros": bytes(_CHUNK),
    "one line": b"a" * _CHUNK,
    "line ends": b"\n" * _CHUNK,
    "lines": (json.dumps({"text": "word " * 2000}) + "\n").encode() * (_CHUNK // 10_013),
}


def write_bomb(path, fill, size=_SIZE):
    """A file of `size` bytes that repeat `fill`."""
    if path.suffix == ".gz":
        with gzip.open(path, "wb") as out:
            for _ in range(size // len(fill)):
                out.write(fill)
        return
    compressor = zstandard.ZstdCompressor(level=3).compressobj()
    with path.open("wb") as out:
        for _ in range(size // len(fill)):
            out.write(compressor.compress(fill))
        out.write(compressor.flush())


# In a process of its own, whose peak is that of the reading alone.
_MEASURE = """
import json, resource, sys
from tilewright.data.common.records import Rejected
from tilewright.data.sources.user_files import user_source
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
items = user_source(sys.argv[1])
user_source(sys.argv[2])
for part in user_source(sys.argv[2]).parts: list(part.read())
before, rejects, characters = peak(), [[r.rule, r.count, r.value] for r in items.rejects], 0
for part in items.parts:
    for item in part.read():
        if isinstance(item, Rejected): rejects.append([item.rule, item.count, item.value])
        else: characters += len(item.text)
print(json.dumps({"peak": peak() - before, "rejects": rejects, "characters": characters}))
"""


def measure(path, tmp_path):
    """Peak over the baseline, rejects and characters of reading `path`."""
    small = tmp_path / f"small{''.join(path.suffixes)}"
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": ["small"]}), small)
    else:
        small.write_bytes(b"x")
    run = subprocess.run([sys.executable, "-c", _MEASURE, str(path), str(small)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("fill", "suffix"), covering(("one line", "lines"), ("txt.gz", "txt.zst", "jsonl.gz", "jsonl.zst"), pairs=False)
)
def test_a_bomb_is_read_in_bounded_memory(fill, suffix, tmp_path):
    path = tmp_path / f"bomb.{suffix}"
    write_bomb(path, FILL[fill])
    found = measure(path, tmp_path)
    assert found["peak"] < ROOM, f"{found['peak'] / 2**20:.0f} MiB over the baseline"
    reasons = {reason: example for reason, _, example in found["rejects"]}
    too_much = [example for reason, example in reasons.items() if "times its size" in reason]
    assert len(too_much) == 1, found["rejects"]
    assert "MiB from" in too_much[0]
    assert found["characters"] < _SIZE / 4


@pytest.mark.parametrize(("fill", "suffix"), covering(("zeros", "line ends"), ("txt.gz", "jsonl.zst"), pairs=False))
def test_any_filling_is_set_aside(fill, suffix, tmp_path):
    path = tmp_path / f"bomb.{suffix}"
    write_bomb(path, FILL[fill], 24 << 20)
    items = [item for part in user_source(str(path)).parts for item in part.read()]
    assert sum("times its size" in item.rule for item in items if isinstance(item, Rejected)) == 1


@pytest.mark.parametrize("how", some(("plain", "dictionary"), "dictionary"))
def test_a_parquet_bomb_is_read_in_bounded_memory(how, tmp_path):
    path = tmp_path / "bomb.parquet"
    if how == "plain":  # one page that is large
        table, options = pa.table({"text": ["a" * (128 << 20)]}), {"use_dictionary": False}
    else:  # one value of a megabyte, a thousand times
        table = pa.table({"text": pa.DictionaryArray.from_arrays([0] * 1000, ["a" * (1 << 20)])})
        options = {"use_dictionary": True}
    pq.write_table(table, path, compression="zstd", store_schema=False, **options)
    assert path.stat().st_size < 1 << 17
    found = measure(path, tmp_path)
    assert found["peak"] < ROOM, f"{found['peak'] / 2**20:.0f} MiB over the baseline"
    if how == "plain":
        ((reason, count, example),) = found["rejects"]
        assert "times its size" in reason
        assert count == 1
        assert "MiB from" in example


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_text_that_compresses_well_is_not_set_aside(suffix, tmp_path):
    """Forty times smaller, and a line of ten megabytes."""
    draw = random.Random(0)
    text = b"".join(b"%d " % draw.getrandbits(24) + b"the same words " * 20 + b"\n" for _ in range(50_000))
    row = json.dumps({"text": text[: 10 << 20].decode()}).encode() + b"\n"
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    (tmp_path / f"a.txt.{suffix}").write_bytes(pack(text))
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(pack(row))
    items = [item for part in user_source(str(tmp_path)).parts for item in part.read()]
    assert [item for item in items if isinstance(item, Rejected)] == []
    assert sum(len(item.text) for item in items if isinstance(item, Record)) == len(text) + (10 << 20)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_text_without_line_ends_is_cut_between_characters(suffix, tmp_path):
    text = "aé漢🦊" * 400_000
    noise = "".join(map(str, range(100_000)))  # so that it is no bomb
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    (tmp_path / f"a.txt.{suffix}").write_bytes(pack((noise + text).encode()))
    items = [item for part in user_source(str(tmp_path)).parts for item in part.read()]
    assert all(isinstance(item, Record) for item in items), items[-1]
    assert "".join(item.text for item in items) == noise + text


def test_a_row_too_long_is_set_aside_alone(tmp_path):
    long = json.dumps({"text": "".join(map(str, range(4_000_000)))}).encode() + b"\n"
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "before"}\n' + long + b'{"text": "after"}\n', 1))
    items = [item for part in user_source(str(path)).parts for item in part.read()]
    assert [item.text for item in items if isinstance(item, Record)] == ["before", "after"]
    (reject,) = [item for item in items if isinstance(item, Rejected)]
    assert reject.rule == "line longer than 16.00 MiB"
    assert reject.count == 1


def test_an_image_of_too_many_pixels_is_set_aside(tmp_path):
    image = pytest.importorskip("PIL.Image")
    from tilewright.data.dataset.prepared_images import _decode

    image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    assert _decode(tmp_path / "bomb.png", 8) == "more than 67108864 pixels: 9000 x 9000"

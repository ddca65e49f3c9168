"""Damaged files of every format: no error gets out, nothing hangs, memory is bounded, and what is lost is said."""

import random
import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.readers.made import every_format, read
from tests.data.readers.packed import docx_bytes, epub_bytes, notebook_bytes, warc_bytes
from tilewright.data.readers.limits import ReadLimits, ReadOptions

PACKED = {"a.ipynb": notebook_bytes(), "a.docx": docx_bytes(), "a.epub": epub_bytes()}
FILES = every_format() | PACKED
ALL = FILES | {"a.warc": warc_bytes()}
LIMITS = ReadLimits(parse_s=5, unpacked_bytes=64 << 20)
OPTIONS = ReadOptions(image_size=8, log_mel=True)


def damage(data: bytes, how: str, draw: random.Random) -> bytes:
    """`data` cut off, with bits flipped, with a piece overwritten, repeated or taken out."""
    if how == "cut":
        return data[: draw.randint(1, len(data))]
    out = bytearray(data)
    if how == "flip":
        for _ in range(draw.randint(1, 8)):
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
        return bytes(out)
    at, size = draw.randrange(len(out)), draw.randint(1, 64)
    if how == "overwrite":
        out[at : at + size] = draw.randbytes(size)
    elif how == "repeat":
        out[at:at] = out[at : at + size] * draw.randint(1, 50)
    else:
        del out[at : at + size]
    return bytes(out)


HOW = ("cut", "flip", "overwrite", "repeat", "remove")


def check(path, data: bytes) -> None:
    path.write_bytes(data)
    records, rejects = read(path, LIMITS, OPTIONS)
    assert records or rejects, "a file left no trace"
    for record in records:
        record.text.encode("utf-8")
        record.part.encode("utf-8")
        assert 0 <= record.start <= record.stop
    for reject in rejects:
        assert reject.rule
        reject.excerpt.encode("utf-8", "strict")


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_is_read_without_a_reject(name, tmp_path):
    (tmp_path / name).write_bytes(FILES[name])
    records, rejects = read(tmp_path / name)
    assert records
    assert rejects == []


@pytest.mark.parametrize("name", ALL)
def test_a_damaged_file(name, tmp_path):
    draw = random.Random(name)
    for number in range(12):
        check(tmp_path / name, damage(ALL[name], HOW[number % len(HOW)], draw))


@given(st.binary(min_size=1, max_size=300), st.sampled_from(sorted(FILES)))
def test_random_bytes_under_any_name(tmp_path_factory, data, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    check(path, data)


@given(st.binary(max_size=100), st.sampled_from(sorted(FILES)), st.sampled_from(sorted(FILES)))
def test_the_start_of_one_format_under_the_name_of_another(tmp_path_factory, tail, first, name):
    check(tmp_path_factory.mktemp("fuzz") / name, FILES[first][:64] + tail)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files(tmp_path):
    draw, before = random.Random(0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    names, slowest = sorted(ALL), (0.0, "")
    for number in range(10_000):
        name = names[number % len(names)]
        data = ALL[name]
        for _ in range(draw.randint(1, 3)):
            data = damage(data, draw.choice(HOW), draw) or b"x"
        start = time.process_time()
        try:
            check(tmp_path / name, data)
        except BaseException:
            (tmp_path / "culprit").write_bytes(data)
            print(f"case {number}: {name}, kept as {tmp_path / 'culprit'}")
            raise
        slowest = max(slowest, (time.process_time() - start, name))
    assert slowest[0] < 10, slowest
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 << 10, f"{grown >> 10} MiB over the baseline"

"""Archives and compressed files: every member by its name, and nothing that one could do to the machine."""

import gzip
import io
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.cover import some
from tests.data.readers.made import COMPRESS, HTML, TEXT, image_bytes, pdf_bytes, read, refusal, tar_bytes, zip_bytes
from tilewright.core.errors import DataError
from tilewright.data.readers.limits import ReadLimits

MAKE = {"zip": zip_bytes, "tar": tar_bytes}


@pytest.mark.parametrize("kind", MAKE)
def test_members_are_read_as_files_are(kind, tmp_path):
    members = {
        "b/page.html": HTML.encode(),
        "../../etc/passwd.txt": TEXT.encode(),
        "paper.pdf": pdf_bytes(["One", "Two"]),
        "deep/inner.zip": zip_bytes({"x/y.md": b"# Inner\n"}),
        "pic.png": image_bytes(),
        "pic.txt": b"A caption",
        "key.pem": b"-----BEGIN",
    }
    path = tmp_path / f"a.{kind}"
    path.write_bytes(MAKE[kind](members))
    before = set(os.listdir(tmp_path))
    records, rejects = read(path)
    found = {record.part: record.text.strip() for record in records}
    assert found == {
        "../../etc/passwd.txt": TEXT.strip(),
        "b/page.html": "First bold text.",
        "paper.pdf > page 1": "One",
        "paper.pdf > page 2": "Two",
        "deep/inner.zip > x/y.md": "# Inner",
        "pic.png": "A caption",
    }
    assert {(r.part, r.rule) for r in rejects} == {
        ("pic.txt", "text of another file"),
        ("key.pem", "file type is not read"),
    }
    assert {record.path for record in records} == {path.name}
    assert set(os.listdir(tmp_path)) == before
    text = next(record for record in records if "passwd" in record.part)
    assert TEXT.encode()[text.start : text.stop].decode() == text.text


def test_depth(tmp_path):
    data, path = TEXT.encode(), tmp_path / "a.zip"
    for level in range(5):
        data = zip_bytes({f"{level}.zip" if level else "a.txt": data})
    path.write_bytes(data)
    reject = refusal(path)
    assert (reject.rule, reject.value, reject.threshold) == ("depth of archives", 4.0, 3)
    assert len(read(path, ReadLimits(depth=5))[0]) == 1


@pytest.mark.parametrize("kind", MAKE)
def test_too_many_members(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(MAKE[kind]({f"{i}.txt": b"words" for i in range(30)}))
    rejects = read(path, ReadLimits(members=10))[1]
    (reject,) = [r for r in rejects if r.rule == "members of an archive"]
    assert reject.threshold == 10
    assert reject.value > 10


BOMBS = ["a.txt.gz", "a.txt.zst", "a.txt.xz", "a.txt.bz2", "a.zip", "a.zip.gz"]


@pytest.mark.parametrize("name", some(BOMBS, "a.txt.zst", "a.zip.gz"))
def test_a_bomb(name, tmp_path):
    bomb = b"word and line\n" * (1 << 20)
    path = tmp_path / name
    if "zip" in name:
        bomb = zip_bytes({"a.txt": bomb})
    path.write_bytes(bomb if name == "a.zip" else COMPRESS[path.suffix](bomb))
    reject = next(r for r in read(path)[1] if r.rule == "compression ratio")
    assert reject.threshold == 256
    assert reject.value > 200
    limits = ReadLimits(ratio=1e9, unpacked_bytes=5 << 20)
    assert [(r.rule, r.threshold) for r in read(path, limits)[1]][-1] == ("unpacked bytes", 5 << 20)


def test_members_that_share_their_bytes_are_bounded_together(tmp_path):
    """Of 200 members each expands 250 times, which alone is allowed; together they are more than the archive may be."""
    inner = zip_bytes({"a.txt": b"ab" * (1 << 19)})
    with zipfile.ZipFile(io.BytesIO(inner)) as archive:
        info = archive.infolist()[0]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("0.txt", b"ab" * (1 << 19))
        for number in range(1, 200):
            copy = zipfile.ZipInfo(f"{number}.txt")
            for field in ("header_offset", "CRC", "compress_size", "file_size", "compress_type", "flag_bits"):
                setattr(copy, field, getattr(archive.infolist()[0], field))
            archive.filelist.append(copy)
    assert info.file_size == 1 << 20
    path = tmp_path / "a.zip"
    path.write_bytes(out.getvalue())
    records, rejects = read(path)
    assert sum(len(record.text) for record in records) <= 8 << 20
    assert rejects


_PEAK = """
import resource, sys
from pathlib import Path
from tilewright.data.readers.read_file import read_file
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
list(read_file(Path(sys.argv[1]), "a", "d"))
before = peak()
size = sum(len(getattr(item, "text", "")) for item in read_file(Path(sys.argv[2]), "b", "d"))
print(peak() - before, size)
"""


@pytest.mark.parametrize("suffix", some([".gz", ".xz"], ".xz"))
def test_a_large_file_is_unpacked_in_bounded_memory(suffix, tmp_path):
    big, small = tmp_path / f"a.txt{suffix}", tmp_path / f"b.txt{suffix}"
    lines = b"".join(b"%d some words of a line\n" % i for i in range(1 << (21 if suffix == ".gz" else 20)))
    big.write_bytes(gzip.compress(lines, 1) if suffix == ".gz" else lzma.compress(lines[: 16 << 20], preset=0))
    small.write_bytes(COMPRESS[suffix](TEXT.encode()))
    command = [sys.executable, "-c", _PEAK, str(small), str(big)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, size = map(int, run.stdout.split())
    assert size >= 16 << 20
    assert peak < 64, f"{peak} MiB over the baseline"


def test_links_devices_and_damage_in_a_tar(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE), ("f", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    path = tmp_path / "a.tar"
    path.write_bytes(out.getvalue())
    reject = refusal(path)
    assert (reject.rule, reject.count) == ("link or device in an archive", 3)
    negative = bytearray(tar_bytes({"a.txt": TEXT.encode(), "b.txt": TEXT.encode()}))
    negative[124:136] = b"\xff" * 11 + b"\x00"  # the size in base 256: below zero, which sends tarfile back for ever
    header = bytes(negative[:148]) + b" " * 8 + bytes(negative[156:512])
    negative[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(negative)
    assert any("tar" in reject.rule or "member" in reject.rule for reject in read(path)[1])


def test_encrypted_members_and_office_documents(tmp_path):
    data = bytearray(zip_bytes({"a.txt": TEXT.encode()}))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    assert refusal(path).rule == "encrypted member"
    path.write_bytes(zip_bytes({"[Content_Types].xml": b"<x/>", "word/document.xml": b"<y/>"}))
    assert refusal(path).rule.startswith("office document")


def test_a_reject_does_not_say_where_a_member_was_unpacked(tmp_path):
    """Such a place differs each time, and a build must not."""
    path = tmp_path / "a.zip"
    path.write_bytes(zip_bytes({"x/pic.png": b"no image", "y/tone.flac": b"fLaC and no sound"}))
    rejects = read(path)[1]
    assert len(rejects) == 2
    assert rejects == read(path)[1]
    for reject in rejects:
        assert "tilewright-" not in f"{reject.value}{reject.excerpt}"
        assert reject.part.split("/")[1] in reject.value


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    assert refusal(tmp_path / "pipe.txt").rule == "not a regular file"
    assert refusal(tmp_path / "loop.txt").rule == "cannot be read"
    assert refusal(tmp_path / "absent.txt").rule == "cannot be read"
    assert refusal(tmp_path).rule == "not a regular file"


def test_a_full_disk_is_no_bad_data(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(TEXT.encode()))

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    with pytest.raises(DataError, match="No space left"):
        read(path)

"""What this machine lacks fails a read and is no reject; what is wrong with a file is a reject and fails nothing."""

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.build.corpora import prose
from tests.data.readers.made import COMPRESS, TEXT, every_format, read, zip_bytes
from tilewright.core import env
from tilewright.core.errors import TilewrightError, is_of_machine, machine_error
from tilewright.data.readers.temporary_files import ScratchFile

ROOT = Path(__file__).resolve().parents[3]


def write_files(folder: Path) -> None:
    for name, data in every_format().items():
        (folder / name).write_bytes(data)
    inner = zip_bytes({"b.txt.gz": COMPRESS[".gz"](TEXT.encode())})
    (folder / "nested.zip").write_bytes(zip_bytes({"a.zip": inner}))
    (folder / "legacy.csv").write_bytes("text,n\nLe café dépend à présent de l'été.,1\n".encode("latin-1") * 3)
    (folder / "damaged.zip").write_bytes(zip_bytes({"a.txt": TEXT.encode()})[:-30])
    (folder / "damaged.parquet").write_bytes(every_format()["a.parquet"][:-9])


def check_starved(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "tests.data.readers.starved", str(folder), *arguments]
    environ = env.importing(ROOT / "src")
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == len(list(folder.iterdir()))
    for name, found in rows:
        assert not [one for one in found if one.startswith("other")], (name, found)
    assert any(one != "same" for _, found in rows for one in found), "no limit was felt"


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["files", "bytes", "memory"])
def test_a_file_is_read_as_ever_or_not_at_all(kind, tmp_path):
    """Under limits from none at all to enough: the same records and rejects, or an error."""
    write_files(tmp_path)
    for path in tmp_path.iterdir():
        if path.name not in ("nested.zip", "legacy.csv", "a.parquet", "damaged.parquet", "a.flac", "a.png", "a.tgz"):
            path.unlink()
    check_starved(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", ["files", "bytes", "memory"])
def test_a_file_of_any_format_is_read_as_ever_or_not_at_all(kind, tmp_path):
    write_files(tmp_path)
    check_starved(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", ["files", "bytes"])
def test_a_build_under_a_limit_keeps_nothing_wrong(kind, tmp_path):
    """It fails, or gives the dataset; after a failure the same build without the limit gives it."""
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        for i in range(12):
            (folder / f"{i}.txt").write_text(prose(20 * number + i))
        (folder / "a.zip").write_bytes(zip_bytes({f"{i}.txt": prose(100 + i).encode() for i in range(4)}))
        (folder / "rows.parquet").write_bytes(every_format()["a.parquet"])
    check_starved(tmp_path, kind, "build")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.EFBIG])
@pytest.mark.parametrize("what", ["TemporaryDirectory", "write"])
def test_temporary_files_that_cannot_be_written(what, number, tmp_path, monkeypatch):
    """Of every format that needs some, one in another too: an error in four parts that names their folder."""

    def broken(*_args, **_kwargs):
        raise OSError(number, "the fault")

    class Broken(ScratchFile):
        def __init__(self, path):
            super().__init__(path)
            self._file.close()
            self._file = SimpleNamespace(write=broken, close=lambda: None)

    for name, data in every_format().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "nested.zip").write_bytes(zip_bytes({"a.zip": zip_bytes({"b.txt": TEXT.encode()})}))
    if what == "write":
        monkeypatch.setattr("tilewright.data.readers.unpack.ScratchFile", Broken)
    else:
        monkeypatch.setattr(tempfile, what, broken)
    failed, said = [], []
    for path in sorted(tmp_path.iterdir()):
        try:
            read(path)
        except TilewrightError as error:
            failed.append(path.suffix)
            said.append(str(error))
    assert all(tempfile.gettempdir() in one for one in said)
    assert {".zip", ".tar", ".tgz", ".gz", ".zst", ".xz", ".bz2"} <= set(failed)


def test_a_giant_number_in_a_file_is_not_the_machine():
    assert not is_of_machine(MemoryError())
    assert not is_of_machine(OSError("Invalid data stream"))
    assert not is_of_machine(OSError(errno.EINVAL, "Invalid argument"))


@pytest.mark.parametrize(
    ("error", "way"),
    [
        (OSError(errno.ENOSPC, "full"), "free some space"),
        (OSError(errno.EMFILE, "many"), "ulimit -n"),
        (OSError(errno.EFBIG, "large"), "ulimit -f"),
        (OSError(errno.ENOMEM, "none"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (OSError(errno.EIO, "broken"), "read and write"),
    ],
)
def test_what_to_do_is_what_mends_it(error, way):
    problem = machine_error(error, "/somewhere").problems[0]
    assert way in problem.try_
    assert all((problem.what, problem.got, problem.need, problem.where))

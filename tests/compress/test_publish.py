"""An artefact is whole or not there: on a full disk, after an error, over an older one."""

import errno
import os

import pytest

from tilewright.compress.export.publish import artefact_bytes, artefact_hash, publish
from tilewright.core.errors import CheckpointError


def write_file(text):
    return lambda path: path.write_text(text)


def write_folder(**files):
    def write(path):
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)

    return write


def full_disk(path):
    path.mkdir()
    (path / "first").write_text("half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_artefact_and_nothing_else(tmp_path):
    publish(tmp_path / "model", write_folder(a="1"))
    before = artefact_hash(tmp_path / "model")
    with pytest.raises(CheckpointError, match="No space left on device"):
        publish(tmp_path / "model", full_disk)
    assert artefact_hash(tmp_path / "model") == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_error_of_ours_leaves_nothing_either(tmp_path):
    def broken(path):
        path.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish(tmp_path / "model", broken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", [write_file("old"), write_folder(a="1", b="2")])
@pytest.mark.parametrize("new", [write_file("new"), write_folder(b="3")])
def test_an_older_artefact_is_replaced_whole(tmp_path, old, new):
    publish(tmp_path / "model", old)
    publish(tmp_path / "model", new)
    new(tmp_path / "alone")
    assert artefact_hash(tmp_path / "model") == artefact_hash(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "model"]


def test_hash_and_size_of_a_folder_are_those_of_its_files_and_names(tmp_path):
    publish(tmp_path / "one", write_folder(a="1", b="22"))
    publish(tmp_path / "two", write_folder(a="1", c="22"))
    assert artefact_bytes(tmp_path / "one") == 3
    assert artefact_hash(tmp_path / "one") != artefact_hash(tmp_path / "two")

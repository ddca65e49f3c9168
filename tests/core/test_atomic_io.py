"""What is written is on the disk before it has its name, and the name is before the call returns."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tilewright.core.atomic_io import publish_folder, remove_folder, write_manifest, write_whole


@pytest.fixture
def done(monkeypatch):
    """Names synced and renamed, in order."""
    found = []

    def name(file):
        return os.path.basename(os.readlink(f"/proc/self/fd/{file}"))

    def renamed(real):
        def run(source, target):
            real(source, target)
            found.append(("rename", os.path.basename(source), os.path.basename(target)))

        return run

    monkeypatch.setattr(os, "fsync", lambda file: found.append(("sync", name(file))))
    monkeypatch.setattr(os, "replace", renamed(os.replace))
    monkeypatch.setattr(os, "rename", renamed(os.rename))
    return found


def test_a_file(done, tmp_path):
    write_whole(tmp_path / "a.json", "1")
    assert done == [("sync", "a.json.partial"), ("rename", "a.json.partial", "a.json"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "deep/b", "deep/er/c"]])
def test_a_folder(done, tmp_path, names):
    partial = tmp_path / "x.partial"
    for name in names:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(name)
    write_manifest(partial)
    done.clear()
    publish_folder(partial, tmp_path / "x")
    at = done.index(("rename", "x.partial", "x"))
    inside = {path.name for path in (tmp_path / "x").rglob("*")} | {"x.partial"}
    assert {name for _, name in done[:at]} == inside
    assert done[at + 1 :] == [("sync", tmp_path.name)]


def test_a_folder_that_several_remove_at_the_same_time_is_gone(tmp_path):
    folder = tmp_path / "x"
    for number in range(400):
        (folder / f"{number % 20}").mkdir(parents=True, exist_ok=True)
        (folder / f"{number % 20}" / f"{number}").write_text("x")
    with ThreadPoolExecutor(4) as several:
        assert list(several.map(remove_folder, [folder] * 4)) == [None] * 4
    assert list(tmp_path.iterdir()) == []
    remove_folder(folder)


def test_what_cannot_be_removed_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        remove_folder(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(OSError, match="symbolic link"):
        remove_folder(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]

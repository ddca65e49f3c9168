"""What is written is on the disk before it has its name, and the name is before the call returns."""

import os

import pytest

from tilewright.core.atomic_io import publish_folder, write_manifest, write_whole


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

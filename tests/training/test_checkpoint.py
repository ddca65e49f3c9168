"""Checkpoints are whole or not there, survive a bad disk, and the newest sound one is found."""

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.core.atomic_io import check_manifest
from tilewright.core.errors import CheckpointError
from tilewright.training.checkpoint import checkpoint_store as store_module
from tilewright.training.checkpoint import write_checkpoint
from tilewright.training.checkpoint.checkpoint_meta import read_meta
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors, stored_tensors


def _tensors(seed: int, size: int = 50) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(size, 3, generator=generator),
        "b": torch.randn(size, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(seed),
        "empty": torch.empty(0, 4),
    }


def _save(store: CheckpointStore, step: int) -> None:
    store.save(step, _tensors(step), {"step": step})
    store.wait()


@pytest.mark.parametrize("background", [True, False])
def test_tensors_and_meta_come_back_bitwise(tmp_path, background):
    store = CheckpointStore(tmp_path / "c", background=background)
    _save(store, 7)
    (record,) = store.finished()
    assert record.error is None
    assert record.background is background
    assert record.bytes > 50 * 3 * 4
    path, rejected = store.newest_sound()
    assert path == tmp_path / "c" / "step_00000007"
    assert rejected == []
    assert read_meta(path) == {"step": 7}
    wanted = _tensors(7)
    assert stored_tensors(path) == {name: (t.dtype, tuple(t.shape)) for name, t in wanted.items()}
    targets = {name: torch.zeros_like(t) for name, t in wanted.items()}
    read_tensors(path, targets)
    for name, tensor in wanted.items():
        assert torch.equal(targets[name], tensor), name


def test_background_save_holds_the_values_of_its_call(tmp_path):
    store = CheckpointStore(tmp_path)
    tensors = {"w": torch.zeros(300_000)}
    store.save(1, tensors, {})
    tensors["w"].fill_(5.0)
    store.save(2, tensors, {})
    tensors["w"].fill_(9.0)
    store.close()
    for step, value in ((1, 0.0), (2, 5.0)):
        target = {"w": torch.full((300_000,), -1.0)}
        read_tensors(store.path_of(step), target)
        assert torch.equal(target["w"], torch.full((300_000,), value))


def test_save_now_is_written_when_it_returns_and_makes_no_copy(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(4, _tensors(4), {}, now=True)
    assert store.newest_sound()[0] == store.path_of(4)
    assert store._staging.num_bytes == 0
    assert store.finished()[0].background is False


def test_keeps_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        _save(store, step)
    assert [path.name for path in store.paths()] == ["step_00000015", "step_00000020"]


def test_a_step_in_place_is_not_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, 3)
    _save(store, 3)
    assert len(store.finished()) == 1


@examples(25)
@given(
    name=st.sampled_from(["__0_0.distcp", ".metadata", "index.json", "meta.json", "manifest.json"]),
    where=st.floats(0, 0.999),
)
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_any_damage_to_the_newest_is_found_and_the_one_before_is_used(tmp_path_factory, damage, name, where):
    folder = tmp_path_factory.mktemp("damage")
    store = CheckpointStore(folder)
    _save(store, 1)
    _save(store, 2)
    _damage(store.path_of(2) / name, damage, where)
    path, rejected = store.newest_sound()
    if path == store.path_of(2):  # a flipped bit in the manifest's white space changes nothing that is checked
        assert name == "manifest.json"
        assert damage == "flip"
    else:
        assert path == store.path_of(1)
        assert [r.path for r in rejected] == [store.path_of(2)]
        assert rejected[0].reason


def _damage(path, damage: str, where: float) -> None:
    data = bytearray(path.read_bytes())
    at = int(len(data) * where)
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:at])
    else:
        data[at] ^= 0x11
        path.write_bytes(data)


def test_a_rejected_checkpoint_makes_room_for_its_step(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    (store.path_of(1) / "meta.json").write_text("{")
    path, rejected = store.newest_sound()
    assert path is None
    store.set_aside(rejected[0])
    fresh = CheckpointStore(tmp_path)
    _save(fresh, 1)
    assert fresh.newest_sound()[0] == fresh.path_of(1)
    assert (tmp_path / "step_00000001.rejected").is_dir()


def test_partial_folders_are_no_checkpoints_and_are_removed(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    shutil.copytree(store.path_of(1), tmp_path / "step_00000002.partial")
    assert store.newest_sound()[0] == store.path_of(1)
    assert [path.name for path in store.remove_unfinished()] == ["step_00000002.partial"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def _all(store: CheckpointStore) -> None:
    """What a run does with the checkpoints that are there, and with the next one."""
    _, rejected = store.newest_sound()
    for rejection in rejected:
        store.set_aside(rejection)
    store.remove_unfinished()
    _save(store, 4)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("what", ["folder", "checkpoints"])
def test_what_goes_away_between_listing_and_use_is_gone(tmp_path, monkeypatch, number, what):
    """Another process removes it: at each place where a checkpoint is opened, renamed or removed."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    _save(CheckpointStore(store.folder, keep=3), 1)
    for step, end in ((2, ""), (3, ""), (5, ".partial"), (6, ".partial")):
        shutil.copytree(store.path_of(1), store.path_of(step).with_suffix(end))
    (store.path_of(3) / "meta.json").write_text("{")
    places = []

    def meanwhile(module, name):
        real = getattr(module, name)

        def call(path, *args):
            places.append(name)
            if len(places) == number + 1:
                shutil.rmtree(store.folder if what == "folder" else path, ignore_errors=True)
            return real(path, *args)

        monkeypatch.setattr(module, name, call)

    for name in ("check_manifest", "listed_files", "read_index", "remove_folder"):
        meanwhile(store_module, name)
    meanwhile(Path, "rename")
    _all(store)
    assert len(places) > number
    assert [path.name for path in store.folder.iterdir() if path.suffix != ".rejected"] == ["step_00000004"]
    assert store.newest_sound() == (store.path_of(4), [])


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, background):
    store = CheckpointStore(tmp_path, background=background)
    _save(store, 1)
    store.finished()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, before[1])
    )  # the kernel refuses bytes past this, as a full disk does
    try:
        store.save(2, {"w": torch.zeros(500_000)}, {})
        store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (record,) = store.finished()
    assert record.error is not None
    assert "too large" in record.error
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert check_manifest(store.path_of(1)) is None
    _save(store, 3)  # and the store continues when there is room again
    assert store.newest_sound()[0] == store.path_of(3)


def _disk(monkeypatch, folder, num_bytes: int) -> None:
    """No more than so many bytes in the folder: the last write of a checkpoint fails as on a full disk."""
    write = write_checkpoint.write_entries

    def write_entries(path, entries):
        size = write(path, entries)
        if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "manifest.json"))
        return size

    monkeypatch.setattr(write_checkpoint, "write_entries", write_entries)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("room", [2, 3])
def test_a_full_disk_drops_the_oldest_and_tries_again(tmp_path, monkeypatch, room, background):
    """There is room for `room` checkpoints, and five are wanted: the newest ones stay, each save succeeds."""
    store = CheckpointStore(tmp_path, keep=5, background=background)
    _save(store, 1)
    (first,) = store.finished()
    _disk(monkeypatch, tmp_path, int((room + 0.5) * first.bytes * 1.1))
    dropped = []
    for step in range(2, 8):
        _save(store, step)
        (record,) = store.finished()
        assert record.error is None, record.error
        dropped += record.dropped
        assert len(store.paths()) <= room
        assert store.newest_step == step
        assert store.newest_sound() == (store.path_of(step), [])
    assert dropped == [store.path_of(step).name for step in range(1, 8 - room)]


def test_the_only_checkpoint_stays_on_a_full_disk(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=3)
    _save(store, 1)
    store.finished()
    _disk(monkeypatch, tmp_path, 0)
    for step in (2, 3):
        _save(store, step)
        (record,) = store.finished()
        assert "No space left" in record.error
        assert record.dropped == ()
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert store.newest_sound() == (store.path_of(1), [])


def test_no_checkpoint_is_dropped_for_one_that_is_damaged(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=3)
    _save(store, 1)
    _save(store, 2)
    store.finished()
    next(store.path_of(2).glob("*.distcp")).write_bytes(b"")
    _disk(monkeypatch, tmp_path, 0)
    _save(store, 3)
    (record,) = store.finished()
    assert "No space left" in record.error
    assert store.newest_sound()[0] == store.path_of(1)


def test_a_save_gives_the_run_folder_no_second_life(tmp_path):
    """A run folder that was deleted is not made again by a checkpoint."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    _save(store, 1)
    (record,) = store.finished()
    assert "FileNotFoundError" in record.error
    assert not (tmp_path / "run").exists()


def test_nor_does_one_that_has_begun(tmp_path, monkeypatch):
    """DCP would make the folder again, with its parents."""
    make = write_checkpoint._make

    def gone_after(partial):
        make(partial)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(write_checkpoint, "_make", gone_after)
    (tmp_path / "run").mkdir()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    _save(store, 1)
    (record,) = store.finished()
    assert "No such file" in record.error
    assert not (tmp_path / "run").exists()


def test_an_unwritable_folder_is_reported(tmp_path):
    (tmp_path / "c").write_text("a file where the folder should be")
    store = CheckpointStore(tmp_path / "c")
    _save(store, 1)
    (record,) = store.finished()
    assert "FileExistsError" in record.error
    assert store.newest_sound() == (None, [])


def test_what_is_no_checkpoint_is_a_four_part_error(tmp_path):
    with pytest.raises(CheckpointError, match="is not a checkpoint") as caught:
        read_meta(tmp_path)
    problem = caught.value.problems[0]
    assert problem.got
    assert problem.need
    assert problem.try_


def test_a_bug_in_the_writing_thread_is_not_swallowed(tmp_path, monkeypatch):
    def broken(folder, entries):
        raise KeyError("a bug of ours")

    monkeypatch.setattr(write_checkpoint, "write_entries", broken)
    store = CheckpointStore(tmp_path)
    store.save(1, {"w": torch.zeros(3)}, {})
    with pytest.raises(KeyError, match="a bug of ours"):
        store.wait()


def test_a_folder_whose_name_is_no_step_is_no_checkpoint(tmp_path):
    """Also where it ends in what is a digit to Python and no number."""
    for name in (
        "step_",
        "step_²",
        "step_1²",
        "step_x",
        "step_00000002.partial",
        "step_-1",
        "step_1_0",
        "step_00000003",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in CheckpointStore(tmp_path).paths()] == ["step_00000003"]

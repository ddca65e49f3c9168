"""A save of several ranks that goes wrong on one: it fails on all, said once, and the checkpoints before it stay."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.ranks import GROUP_S, on_ranks
from tests.training.ranks_that_die import on_ranks_of_which_one_dies
from tests.training.sharded import joined, sharded_state, train
from tilewright.core.atomic_io import MANIFEST, check_manifest
from tilewright.memory.offload.flat_layout import placeholder
from tilewright.training.checkpoint import write_checkpoint
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors

pytestmark = pytest.mark.dist


def _save(store, state, step, **how):
    store.save(step, state.tensors(), state.meta(), **how)
    store.wait()
    (record,) = store.finished()
    return record


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """What became of the saves of two ranks of which one has no room, by folder; and of tensors stored elsewhere."""
    folder = tmp_path_factory.mktemp("full")
    for name in ("limit", "room", "live"):
        (folder / name).mkdir()
    return folder, on_ranks(2, _disk_of_one_full, folder / "limit")


def _disk_of_one_full(rank, folder):
    world = joined(2)
    state, _ = sharded_state(world, seed=0)
    state.optimizer.init_states()
    store = CheckpointStore(folder, world=world)
    records = [_save(store, state, 1)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # the kernel refuses bytes past this, as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    records += [_save(store, state, 2), _save(store, state, 3, now=True)]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    records.append(_save(store, state, 4))
    return records, _room_for_two(rank, folder.with_name("room")), _not_in_memory(rank, folder.with_name("live"))


def test_a_rank_that_cannot_write_fails_the_save_of_all(full):
    folder, ((first, *_), (second, *_)) = full
    folder = folder / "limit"
    assert [record.error for record in first] == [record.error for record in second]
    whole, failed, failed_now, after = first
    for record in (failed, failed_now):
        assert record.error == "rank 1: OSError: [Errno 27] File too large"
        assert record.dropped == ()
    assert whole.error is after.error is None
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000004"]
    assert check_manifest(folder / "step_00000001") is None


def _room_for_two(rank, folder):
    world = joined(2)
    state, _ = sharded_state(world, seed=0)
    store = CheckpointStore(folder, keep=5, world=world)
    hash_files = write_checkpoint.file_entries

    def file_entries(partial: Path, paths):
        if rank == 1 and len(list(folder.iterdir())) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return hash_files(partial, paths)

    with mock.patch.object(write_checkpoint, "file_entries", file_entries):
        return [_save(store, state, step) for step in (1, 2, 3)]


def test_a_disk_that_is_full_for_one_drops_the_oldest_for_all(full):
    folder, ((_, first, _), (_, second, _)) = full
    for records in (first, second):
        assert [record.error for record in records] == [None] * 3
        assert [record.dropped for record in records] == [(), (), ("step_00000001",)]
    assert sorted(path.name for path in (folder / "room").iterdir()) == ["step_00000002", "step_00000003"]


def _not_in_memory(rank, folder):
    """Two replicas whose tensors are stored elsewhere and come when it is their turn, as layer-major runs have them."""
    world = joined(1, 2)
    tensors = {f"w{number}": placeholder((3, 4), torch.float32, "cpu") for number in range(6)}
    asked = []

    def live(name, tensor):
        asked.append(name)
        return torch.full_like(tensor, float(name[1:]))

    store = CheckpointStore(folder, world=world)
    store.save(1, tensors, {}, live=live, compared=tensors)
    (record,) = store.finished()
    return record.error, asked[:6], asked[6:]


def test_tensors_that_come_in_turn_are_written_by_one_of_two_replicas(full):
    folder, ranks = full
    names = [f"w{number}" for number in range(6)]
    written = []
    for *_, (error, compared, own) in ranks:
        assert error is None
        assert compared == names  # in order: what is fetched for one is there for the next
        assert own == sorted(own)
        written += own
    assert sorted(written) == names
    read = {name: torch.empty(3, 4) for name in names}
    read_tensors(folder / "live" / "step_00000001", read)
    assert all((tensor == float(name[1:])).all() for name, tensor in read.items())


def _flips_a_bit(rank, folder):
    world = joined(2, 2)
    records = []
    for now in (False, True):
        state, _ = sharded_state(world, seed=0)
        train(state, 1)
        store = CheckpointStore(folder / str(now), world=world)
        state.save(store, 1, state.meta(), now=now)
        if rank == 3:
            state.model.up.weight.to_local().view(torch.int32)[0, 1] ^= 1
            state.optimizer.state[state.model.mid.bias]["exp_avg"].to_local()[0] += 1
        state.save(store, 2, state.meta(), now=now)
        store.close()
        records.append(store.finished())
    return records


@pytest.mark.support("corruption", "hsdp")
def test_replicas_that_differ_are_named_and_not_saved(tmp_path):
    """Whether it is written in the background or at once; and of what is sound each shard is written once."""
    (tmp_path / "False").mkdir()
    (tmp_path / "True").mkdir()
    for sound, corrupt in (records for of_rank in on_ranks(4, _flips_a_bit, tmp_path) for records in of_rank):
        assert sound.error is None
        for name in ("model.up.weight", "optimizer.mid.bias.exp_avg"):
            assert f"{name} on rank 3, against rank 1" in corrupt.error
        assert corrupt.error.count(" on rank ") == 2
    for now in ("False", "True"):
        (path,) = (tmp_path / now).iterdir()
        index = write_checkpoint.dcp.FileSystemReader(path).read_metadata()
        assert {len(entry.chunks) for entry in index.state_dict_metadata.values()} == {1, 2}
        sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
        assert min(sizes) > sum(sizes) / 8, f"{sizes}: a rank writes hardly anything"


# ---- what is found in the folder ----


def _twice(rank, folder):
    errors = []
    for shard in (4, 1):
        if rank < shard:
            world = joined(shard)
            state, _ = sharded_state(world, seed=0)
            store = CheckpointStore(folder / str(shard), world=world)
            errors += [_save(store, state, step).error for step in (1, 2)]
    return errors


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Two checkpoints of four ranks, and two of one process."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "4").mkdir()
    (folder / "1").mkdir()
    assert on_ranks(4, _twice, folder) == [[None] * 4, *[[None] * 2] * 3]
    return folder


def _without_entry(path: Path, others: Path) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["files"]["__2_0.distcp"]
    (path / MANIFEST).write_text(json.dumps(manifest))


DAMAGE = {
    "a shard is missing": lambda path, others: (path / "__2_0.distcp").unlink(),
    "a shard is cut": lambda path, others: os.truncate(path / "__1_0.distcp", 1000),
    "a rank's manifest is missing": _without_entry,
    "a rank's manifest and shard are missing": lambda path, others: (
        _without_entry(path, others),
        (path / "__2_0.distcp").unlink(),
    ),
    "the manifest is another world's": lambda path, others: shutil.copy(others / MANIFEST, path),
    "the index is another world's": lambda path, others: shutil.copy(others / "index.json", path),
    "a file is left of more ranks": lambda path, others: shutil.copy(path / "__3_0.distcp", path / "__4_0.distcp"),
    "all is another world's but for three files": lambda path, others: shutil.copytree(
        others, path, dirs_exist_ok=True
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_torn_is_set_aside_and_the_one_before_used(two_steps, tmp_path, damage):
    shutil.copytree(two_steps / "4", tmp_path / "c")
    store = CheckpointStore(tmp_path / "c")
    DAMAGE[damage](store.path_of(2), two_steps / "1" / "step_00000002")
    path, (rejection,) = store.newest_sound()
    assert path == store.path_of(1)
    print(rejection.reason)
    assert rejection.path == store.path_of(2)
    store.set_aside(rejection)
    assert store.newest_sound() == (path, [])


# ---- ranks that die ----


def _saves_on_and_on(rank, folder, shard):
    world = joined(shard)
    state, _ = sharded_state(world, seed=0)
    state.optimizer.init_states()
    store, meta = CheckpointStore(folder, world=world), state.meta()
    for step in range(1, 10_000):
        store.save(step, state.tensors(), meta)
        store.wait()
        (record,) = store.finished()
        if record.error is not None:
            later = store.save(step + 1, state.tensors(), meta)
            return record.error, store.finished()[0].error, later
    raise AssertionError("nobody died")


def test_the_ranks_that_are_left_do_not_wait(tmp_path):
    """Each learns that it cannot save any more, and a later save does not wait either."""
    found = on_ranks_of_which_one_dies(3, 1, tmp_path / "step_00000001", 0.05, _saves_on_and_on, tmp_path, 3)
    assert found.keys() == {0, 2}
    for error, later_error, later_s in found.values():
        assert error
        assert "cannot save together any more" in later_error
        assert later_s < GROUP_S / 3, "it waits for no timeout"
    path, rejected = CheckpointStore(tmp_path).newest_sound()
    assert path is not None
    assert rejected == []

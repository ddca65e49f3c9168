"""Reading a checkpoint runs nothing in it, whatever was put there; each plant runs with torch's own reader."""

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import on_ranks
from tests.training.plants import KINDS, Command, change_index, plant_pickle, reseal
from tests.training.sharded import joined
from tilewright.core.errors import CheckpointError
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors, stored_tensors
from tilewright.training.checkpoint.tensor_index import INDEX, IndexFormatError, parse_index, read_index

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


@pytest.fixture
def folder(tmp_path):
    store = CheckpointStore(tmp_path / "c", background=False)
    store.save(1, {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, {"step": 1})
    store.close()
    return store.path_of(1)


def _tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "whole": torch.ones(2)}


def _save_parts(rank, folder):
    world = joined(2)
    tensors = _tensors()
    for name in ("w", "b"):
        tensors[name] = distribute_tensor(tensors[name], world.fsdp_mesh, [Shard(0)])
    store = CheckpointStore(folder, background=False, world=world)
    store.save(1, tensors, {"step": 1})
    store.close()


@pytest.fixture(scope="module")
def made_by_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(2, _save_parts, folder)
    return CheckpointStore(folder).path_of(1)


@pytest.fixture
def of_ranks(made_by_ranks, tmp_path):
    """A copy of a checkpoint of two ranks: two tensors in parts, and a whole one."""
    return shutil.copytree(made_by_ranks, tmp_path / "c" / made_by_ranks.name)


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "mark"


def assert_refused(folder, mark=None) -> str:
    """Both ways of reading it end in an error in four parts, and nothing has run; what the first error says it got."""
    said = []
    for read in (stored_tensors, lambda path: read_tensors(path, {"w": torch.zeros(3, 4)})):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        (problem,) = caught.value.problems
        assert all((problem.what, problem.got, problem.need, problem.try_))
        said.append(problem.got)
    assert mark is None or not mark.exists()
    return said[0]  # DCP of torch 2.11 replaces the second one's reason by its own


# ---- what is written is read ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7, 3), (2, 1, 3, 2)], ids=str)
def test_every_tensor_is_read_as_dcp_reads_it(tmp_path, dtype, shape):
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    path = saved(tmp_path, {"a.b": values, "other": torch.ones(2)})
    assert_as_dcp_reads_it(path)
    read = torch.zeros(shape, dtype=dtype)
    read_tensors(path, {"a.b": read})
    assert torch.equal(read.view(torch.uint8) if shape else read, values.view(torch.uint8) if shape else values)


def saved(folder, tensors):
    """The path of a checkpoint of these tensors."""
    store = CheckpointStore(folder, background=False)
    store.save(1, tensors, {})
    store.close()
    return store.path_of(1)


def assert_as_dcp_reads_it(path):
    theirs, ours = dcp.FileSystemReader(path).read_metadata(), read_index(path)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    return ours


def test_an_index_of_many_tensors_is_read(tmp_path):
    tensors = {f"layer.{i}.weight": torch.full((i % 3 + 1, 2), float(i)) for i in range(600)}
    found = stored_tensors(saved(tmp_path, tensors))
    assert found == {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def test_names_of_every_alphabet_are_read(tmp_path):
    tensors = {name: torch.ones(1) for name in ("ünïcödé", "重み", "a b", "x" * 300, "../up", "", '"', "\\")}
    assert stored_tensors(saved(tmp_path, tensors)).keys() == tensors.keys()


# ---- what is planted ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_in_dcps_own_index_does_not_run(folder, mark, kind):
    """Other tools read that one."""
    data = plant_pickle(folder, kind, mark)
    read = torch.zeros(3, 4)
    read_tensors(folder, {"w": read})
    assert torch.equal(read, _tensors()["w"])
    assert stored_tensors(folder).keys() == {"w", "b"}
    assert CheckpointStore(folder.parent).newest_sound() == (folder, [])
    assert not mark.exists()
    pickle.loads(data)  # the control: as DCP reads it
    assert mark.exists()


@pytest.mark.dist
def test_an_index_of_several_ranks_is_read_as_dcp_reads_it(of_ranks):
    ours = assert_as_dcp_reads_it(of_ranks)
    assert [len(entry.chunks) for entry in ours.state_dict_metadata.values()] == [2, 2, 1]
    read = {"w": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "whole": torch.zeros(2)}
    read_tensors(of_ranks, read)
    for name, tensor in _tensors().items():
        assert torch.equal(read[name], tensor), name


@pytest.mark.dist
@pytest.mark.parametrize("name", ["__1_0.distcp", "../out.distcp", "/etc/passwd", "link"])
def test_a_part_of_another_rank_in_the_wrong_file_is_refused(of_ranks, name):
    """The first rank's part said to be where it is not; the second rank's file is too short for it, or another's."""
    (of_ranks.parent / "out.distcp").write_bytes((of_ranks / "__0_0.distcp").read_bytes())
    (of_ranks / "link").symlink_to(of_ranks.parent / "out.distcp")

    def change(index):
        part = index["w"]["parts"][0]
        part |= {"file": name, "offset": part["offset"] + 10_000 * (name == "__1_0.distcp")}

    change_index(of_ranks, change)
    assert_refused(of_ranks)


@pytest.mark.dist
@pytest.mark.parametrize(
    "parts",
    [
        [((0, 0), (2, 4)), ((1, 0), (1, 4))],
        [((0, 0), (2, 4)), ((0, 0), (1, 4))],
        [((0, 0), (3, 2)), ((0, 1), (3, 2))],
        [((0, 0), (3, 4)), ((3, 0), (0, 4))],
    ],
)
def test_parts_on_top_of_each_other_are_refused(of_ranks, parts):
    """As many elements as the tensor has, and some are missing; the last of these is right."""

    def change(index):
        for part, (offsets, sizes) in zip(index["w"]["parts"], parts, strict=True):
            part |= {"offsets": offsets, "sizes": sizes}

    change_index(of_ranks, change)
    if parts[0][1] == (3, 4):
        assert [chunk.sizes for chunk in read_index(of_ranks).state_dict_metadata["w"].chunks] == [(3, 4), (0, 4)]
    else:
        with pytest.raises(IndexFormatError, match=r"on top of each other|part of a tensor"):
            read_index(of_ranks)


def test_objects_beside_tensors_are_refused(tmp_path, mark):
    """DCP unpickles what is no tensor when it loads it; its folder has no index of ours."""
    weights = {"w": torch.zeros(3, 4), "object": Command(mark)}
    dcp.save(weights, checkpoint_id=tmp_path / "c", no_dist=True)
    assert "index.json is missing" in assert_refused(tmp_path / "c", mark)
    dcp.load({"w": torch.zeros(3, 4), "object": 0}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert mark.exists()


def test_a_command_in_the_place_of_a_tensor_does_not_run(folder, mark):
    planted = io.BytesIO()
    torch.save(Command(mark), planted)
    (folder / "planted.distcp").write_bytes(planted.getvalue())
    place = {"file": "planted.distcp", "offset": 0, "length": len(planted.getvalue())}
    change_index(folder, lambda index: index["w"]["parts"][0].update(place))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        read_tensors(folder, {"w": torch.zeros(3, 4)})
    assert not mark.exists()
    torch.load(folder / "planted.distcp", weights_only=False)
    assert mark.exists()


# ---- what would read or take something else ----


@pytest.mark.parametrize("name", ["../out.distcp", "/etc/passwd", "sub/x", "", ".", "..", "a\0b", "link", "sub"])
def test_files_outside_the_folder_are_not_read(folder, name):
    data = next(folder.glob("*.distcp")).read_bytes()
    (folder.parent / "out.distcp").write_bytes(data)
    (folder / "sub").mkdir()
    (folder / "sub" / "x").write_bytes(data)
    (folder / "link").symlink_to(folder.parent / "out.distcp")
    index = json.loads((folder / INDEX).read_text())
    for tensor in index.values():
        tensor["parts"][0]["file"] = name
    (folder / INDEX).write_text(json.dumps(index))
    assert_refused(folder)


def test_a_compressed_tensor_is_refused(folder):
    """It could unfold to a thousand times its bytes."""
    record = io.BytesIO()
    torch.save(torch.zeros(1 << 20), record)
    packed = io.BytesIO()
    with zipfile.ZipFile(record) as before, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as after:
        for entry in before.infolist():
            after.writestr(entry.filename, before.read(entry))
    assert len(packed.getvalue()) < len(record.getvalue()) / 100
    (folder / "packed.distcp").write_bytes(packed.getvalue())
    place = {"file": "packed.distcp", "offset": 0, "length": len(packed.getvalue())}
    change_index(folder, lambda index: index["w"]["parts"][0].update(place))
    with pytest.raises(CheckpointError, match="compressed"):
        read_tensors(folder, {"w": torch.zeros(3, 4)})


@pytest.mark.parametrize(
    "change",
    {
        "more than its bytes": lambda w, part: w.update(size=[1 << 40, 4]),
        "sizes that wrap": lambda w, part: w.update(size=[1 << 61, 1 << 61]),
        "many dimensions": lambda w, part: w.update(size=[2] * 100),
        "no parts": lambda w, part: w.update(parts=[]),
        "parts twice": lambda w, part: w.update(parts=w["parts"] * 2),
        "past the end of the file": lambda w, part: part.update(offset=1 << 40),
        "negative": lambda w, part: part.update(offset=-1),
        "no number": lambda w, part: part.update(length="long"),
        "a number as text": lambda w, part: part.update(length=str(part["length"])),
        "half a byte": lambda w, part: part.update(length=part["length"] + 0.5),
        "beyond 64 bits": lambda w, part: part.update(length=1 << 70),
        "shorter than its elements": lambda w, part: part.update(length=47),
        "transforms": lambda w, part: part.update(transform_descriptors=["zstd"]),
        "another dtype": lambda w, part: w.update(dtype="Size"),
        "less dimensions": lambda w, part: part.update(offsets=[0]),
        "no file": lambda w, part: part.pop("file"),
    }.items(),
    ids=lambda item: item[0],
)
def test_an_index_that_contradicts_itself_is_refused(folder, change):
    change_index(folder, lambda index: change[1](index["w"], index["w"]["parts"][0]))
    assert_refused(folder)


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "pipe", "sub"])
def test_a_manifest_that_names_something_else_is_refused(folder, name):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"{INDEX}"', f'"{name}"'))
    store = CheckpointStore(folder.parent)
    assert store.newest_sound()[0] is None
    store.close()


# ---- damage ----


@given(st.binary(max_size=400))
@pytest.mark.parametrize("before", [b"", b'{"w": ', b'{"w": {"dtype": "int8", "size": ['])
def test_any_bytes_are_an_index_or_refused(before, data):
    with contextlib.suppress(IndexFormatError):
        assert parse_index(before + data).state_dict_metadata == {}


@given(
    at=st.floats(0, 1), length=st.integers(0, 8), new=st.binary(max_size=8) | st.sampled_from([b"0", b"9", b"-", b"1"])
)
def test_any_change_of_an_index_is_read_or_refused(tmp_path_factory, at, length, new):
    whole = _index(tmp_path_factory)
    start = int(at * len(whole))
    data = whole[:start] + new + whole[start + length :]
    try:
        metadata = parse_index(data)
    except IndexFormatError:
        return
    assert type(metadata) is Metadata
    assert metadata.storage_meta is None
    assert all(place.offset >= 0 and place.length >= 0 for place in metadata.storage_data.values())


_made: list[bytes] = []


def _index(tmp_path_factory) -> bytes:
    if not _made:
        tensors = {"w": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.int8)}
        _made.append((saved(tmp_path_factory.mktemp("index"), tensors) / INDEX).read_bytes())
    return _made[0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_index_or_file_is_refused(folder, share):
    for name in (INDEX, next(folder.glob("*.distcp")).name):
        copy = folder.with_name(f"copy{name}")
        shutil.copytree(folder, copy)
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data[: int(share * len(data))])
        reseal(copy)
        assert_refused(copy)


def test_a_checkpoint_without_an_index_is_refused_in_words(folder):
    """As versions before this one wrote them: with the pickle of DCP alone."""
    (folder / INDEX).unlink()
    reseal(folder)
    assert "index.json is missing: the checkpoint was not written by tilewright" in assert_refused(folder)
    (found,) = CheckpointStore(folder.parent).newest_sound()[1]
    assert "index.json is missing: the checkpoint was not written by tilewright" in found.reason


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"w":' * 100_000,
        b'{"w":{"dtype":"int8","size":[' + b"9" * 100_000 + b'],"parts":[]}}',
        b'{"w":{"dtype":"int8","size":[' + b"1," * 100_000 + b'1],"parts":[]}}',
        b'{"w":{"dtype":"int8","size":[1e400],"parts":[]}}',
        b'{"w":{"dtype":"' + b"x" * 1_000_000 + b'","size":[],"parts":[]}}',
    ],
    ids=["lists", "objects", "a long number", "many dimensions", "infinity", "a long dtype"],
)
def test_bombs_are_refused(data):
    with pytest.raises(IndexFormatError) as caught:
        parse_index(data)
    assert len(str(caught.value)) < 1000

"""Reading a checkpoint runs nothing in it, whatever was put there; each plant runs with torch's own reader."""

import io
import os
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import on_ranks
from tests.training.plants import KINDS, Command, planted_index, real_index, replace_index, reseal
from tests.training.sharded import joined
from tilewright.core.errors import CheckpointError
from tilewright.training.checkpoint.index import INDEX, IndexFormatError, parse_index
from tilewright.training.checkpoint.store import CheckpointStore, read_tensors, stored_tensors

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
    dcp.save({"a.b": values, "other": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    theirs = dcp.FileSystemReader(tmp_path).read_metadata()
    ours = parse_index((tmp_path / INDEX).read_bytes())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    read = torch.zeros(shape, dtype=dtype)
    read_tensors(tmp_path, {"a.b": read})
    assert torch.equal(read.view(torch.uint8) if shape else read, values.view(torch.uint8) if shape else values)


def test_an_index_of_many_tensors_is_read(tmp_path):
    """More than 255 names and objects: the long forms of the opcodes."""
    tensors = {f"layer.{i}.weight": torch.full((i % 3 + 1, 2), float(i)) for i in range(600)}
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    assert stored_tensors(tmp_path) == {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def test_names_of_every_alphabet_are_read(tmp_path):
    tensors = {name: torch.ones(1) for name in ("ünïcödé", "重み", "a b", "x" * 300, "../up", "")}
    dcp.save(dict(tensors), checkpoint_id=tmp_path, no_dist=True)
    assert stored_tensors(tmp_path).keys() == tensors.keys()


# ---- what is planted in the index ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_in_the_index_does_not_run(folder, mark, kind):
    data = planted_index(folder, kind, mark)
    replace_index(folder, data)
    assert_refused(folder, mark)
    pickle.loads(data)  # the control: as DCP reads it
    assert mark.exists()


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_in_the_index_of_several_ranks_does_not_run(of_ranks, mark, kind):
    data = planted_index(of_ranks, kind, mark)
    replace_index(of_ranks, data)
    assert_refused(of_ranks, mark)
    (found,) = CheckpointStore(of_ranks.parent).newest_sound()[1]
    assert ".metadata is not read" in found.reason
    assert not mark.exists()
    pickle.loads(data)
    assert mark.exists()


@pytest.mark.dist
def test_an_index_of_several_ranks_is_read_as_dcp_reads_it(of_ranks):
    theirs = dcp.FileSystemReader(of_ranks).read_metadata()
    ours = parse_index((of_ranks / INDEX).read_bytes())
    assert [len(entry.chunks) for entry in ours.state_dict_metadata.values()] == [2, 2, 1]
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
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
    metadata = real_index(of_ranks)
    place = metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]
    place.relative_path, place.offset = name, place.offset + 10_000 * (name == "__1_0.distcp")
    (of_ranks / INDEX).write_bytes(pickle.dumps(metadata))
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
    metadata = real_index(of_ranks)
    w = metadata.state_dict_metadata["w"]
    places = [metadata.storage_data.pop(MetadataIndex("w", chunk.offsets)) for chunk in w.chunks]
    for chunk, place, (offsets, sizes) in zip(w.chunks, places, parts, strict=True):
        chunk.offsets, chunk.sizes = torch.Size(offsets), torch.Size(sizes)
        metadata.storage_data[MetadataIndex("w", chunk.offsets, len(metadata.storage_data))] = place
    data = pickle.dumps(metadata)
    if parts[0][1] == (3, 4):
        assert [chunk.sizes for chunk in parse_index(data).state_dict_metadata["w"].chunks] == [(3, 4), (0, 4)]
    else:
        with pytest.raises(IndexFormatError, match=r"on top of each other|part of a tensor|belong to no tensor"):
            parse_index(data)


def test_a_class_that_an_index_may_name_stays_as_it_is(folder):
    """BUILD sets attributes of whatever is on the stack; a list of allowed classes would allow these."""
    frozen = pickle.PROTO + b"\x04"
    for name in ("torch.distributed.checkpoint.metadata", "Metadata"):
        frozen += pickle.BINUNICODE + len(name).to_bytes(4, "little") + name.encode()
    state = pickle.dumps((None, {"planted": 1}), protocol=2)[2:-1]
    data = frozen + pickle.STACK_GLOBAL + state + pickle.BUILD + pickle.STOP
    replace_index(folder, data)
    assert_refused(folder)
    assert not hasattr(Metadata, "planted")
    pickle.loads(data)
    assert Metadata.planted == 1
    del Metadata.planted


def test_objects_beside_tensors_are_refused(tmp_path, mark):
    """DCP unpickles what is no tensor when it loads it."""
    weights = {"w": torch.zeros(3, 4), "object": Command(mark)}
    dcp.save(weights, checkpoint_id=tmp_path / "c", no_dist=True)
    assert "object" in assert_refused(tmp_path / "c", mark)
    dcp.load({"w": torch.zeros(3, 4), "object": 0}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert mark.exists()


def test_a_command_in_the_place_of_a_tensor_does_not_run(folder, mark):
    planted = io.BytesIO()
    torch.save(Command(mark), planted)
    (folder / "planted.distcp").write_bytes(planted.getvalue())
    metadata = real_index(folder)
    place = metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]
    place.relative_path, place.offset, place.length = "planted.distcp", 0, len(planted.getvalue())
    replace_index(folder, pickle.dumps(metadata))
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
    metadata = real_index(folder)
    for place in metadata.storage_data.values():
        place.relative_path = name
    (folder / INDEX).write_bytes(pickle.dumps(metadata))
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
    metadata = real_index(folder)
    place = metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]
    place.relative_path, place.offset, place.length = "packed.distcp", 0, len(packed.getvalue())
    replace_index(folder, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="compressed"):
        read_tensors(folder, {"w": torch.zeros(3, 4)})


@pytest.mark.parametrize(
    "change",
    {
        "more than its bytes": lambda w, place: setattr(w, "size", torch.Size([1 << 40, 4])),
        "sizes that wrap": lambda w, place: setattr(w, "size", torch.Size([1 << 61, 1 << 61])),
        "many dimensions": lambda w, place: setattr(w, "size", torch.Size([2] * 100)),
        "no parts": lambda w, place: setattr(w, "chunks", []),
        "parts twice": lambda w, place: setattr(w, "chunks", w.chunks * 2),
        "past the end of the file": lambda w, place: setattr(place, "offset", 1 << 40),
        "negative": lambda w, place: setattr(place, "offset", -1),
        "no number": lambda w, place: setattr(place, "length", "long"),
        "transforms": lambda w, place: setattr(place, "transform_descriptors", ["zstd"]),
        "another dtype": lambda w, place: setattr(w.properties, "dtype", torch.Size),
    }.items(),
    ids=lambda item: item[0],
)
def test_an_index_that_contradicts_itself_is_refused(folder, change):
    metadata = real_index(folder)
    change[1](metadata.state_dict_metadata["w"], metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))])
    (folder / INDEX).write_bytes(pickle.dumps(metadata))
    assert_refused(folder)


@pytest.mark.parametrize("name", ["../../secret", "/dev/zero", "pipe", "sub"])
def test_a_manifest_that_names_something_else_is_refused(folder, name):
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('".metadata"', f'"{name}"'))
    store = CheckpointStore(folder.parent)
    assert store.newest_sound()[0] is None
    store.close()


# ---- damage ----


@given(st.binary(max_size=400))
def test_any_bytes_are_an_index_or_refused(data):
    with pytest.raises(IndexFormatError):
        parse_index(data)


@given(st.binary(max_size=400))
def test_any_bytes_behind_a_header_are_an_index_or_refused(data):
    with pytest.raises(IndexFormatError):
        parse_index(pickle.PROTO + b"\x04" + data)


@given(at=st.floats(0, 1), length=st.integers(0, 8), new=st.binary(max_size=8))
def test_any_change_of_an_index_is_read_or_refused(tmp_path_factory, at, length, new):
    whole = _index(tmp_path_factory)
    start = int(at * len(whole))
    data = whole[:start] + new + whole[start + length :]
    try:
        metadata = parse_index(data)
    except IndexFormatError:
        return
    assert type(metadata) is Metadata
    assert metadata.storage_meta is None or type(metadata.storage_meta) is StorageMeta


_made: list[bytes] = []


def _index(tmp_path_factory) -> bytes:
    if not _made:
        path = tmp_path_factory.mktemp("index")
        dcp.save({"w": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.int8)}, checkpoint_id=path, no_dist=True)
        _made.append((path / INDEX).read_bytes())
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


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04" + b"(" * 200_000 + b".",
        b"\x80\x04)" + b"\x85" * 200_000 + b".",
        b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",  # a deep tuple as a key, whose hash would take the stack
        b"\x80\x04]\x94" + b"h\x00a" * 100_000 + b".",  # a list in itself
        b"\x80\x04\x96" + (1 << 60).to_bytes(8, "little") + b".",  # a bytearray of 2^60 bytes
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # a memo of 2^31 places
        b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b".",
        b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
    ],
    ids=["marks", "tuples", "deep key", "list in itself", "bytearray", "memo", "text", "long"],
)
def test_bombs_are_refused(data):
    with pytest.raises(IndexFormatError):
        parse_index(data)

"""The index of a checkpoint, `.metadata` of `torch.distributed.checkpoint` (DCP), read without executing anything.

DCP's own reader unpickles the index, which runs whatever was put there. Here it is parsed (`inert_pickle`), each
field is checked, and DCP's objects are made from numbers and names. DCP then reads the tensors with
`torch.load(weights_only=True)`. Entries that are no tensors, which DCP unpickles too, and transforms are refused.
"""

import io
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tilewright.training.checkpoint.inert_pickle import Call, Global, InertPickleError, read_inert_pickle

INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_DTYPES = {Global("torch", name): dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KNOWN = {
    *_DTYPES,
    *(Global(_METADATA, name) for name in _CLASSES),
    *(Global(module, name) for module in ("pathlib", "pathlib._local") for name in _PATHS),
    *(Global(_FILES, "_StorageInfo"), Global("torch", "Size"), Global("torch.serialization", "_get_layout")),
}
"""All that torch 2.11 to 2.13 write into an index."""
_MAX_NUMBER = 1 << 62
_MAX_DIMS = 64


class IndexFormatError(ValueError):
    """The index is damaged, or says what an index of tensors never says."""


class TensorReader(FileSystemReader):
    """DCP's reader of a folder, for tensors alone.

    Args:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = Path(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            IndexFormatError: it is not one, or not one of tensors in files of this folder.
            OSError: it cannot be read.
        """
        metadata = parse_index((self._folder / INDEX).read_bytes())
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            _check_file(self._folder, name, end)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        """The bytes of one tensor. A compressed record is refused: torch does not write it, and it could unfold."""
        try:
            with zipfile.ZipFile(_Slice(file, sinfo.offset, sinfo.length)) as record:
                unfolded = sum(entry.file_size for entry in record.infolist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise IndexFormatError(f"{sinfo.relative_path} holds no tensor at byte {sinfo.offset} ({error})") from error
        if unfolded > sinfo.length:
            raise IndexFormatError(f"{sinfo.relative_path} holds a compressed tensor at byte {sinfo.offset}")
        return super()._slice_file(file, sinfo)


class _Slice(io.RawIOBase):
    """`length` bytes of a file from `offset` on. DCP's own view seeks to the wrong side of the end."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError("a place before the start")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


class TensorLoadPlanner(DefaultLoadPlanner):
    """DCP's plan of a load, for tensors alone."""

    def load_bytes(self, read_item: Any, value: Any) -> NoReturn:
        """DCP unpickles here."""
        raise IndexFormatError(f"{read_item.dest_index.fqn} is no tensor")


def parse_index(data: bytes) -> Metadata:
    """The objects of DCP that the bytes of an index describe.

    Raises:
        IndexFormatError: for any other bytes.
    """
    try:
        fields = _state(read_inert_pickle(data, _KNOWN), _METADATA, "Metadata")
    except InertPickleError as error:
        raise IndexFormatError(f"{INDEX} is not read: {error}") from error
    storage = dict(_storage(item) for item in _items(fields.get("storage_data")))
    tensors = dict(_tensor(name, entry, storage) for name, entry in _items(fields.get("state_dict_metadata")))
    if sum(len(tensor.chunks) for tensor in tensors.values()) != len(storage):
        raise _refused("parts that belong to no tensor", len(storage))
    return Metadata(tensors, {name: (name,) for name in tensors}, storage, version=_text(fields.get("version", "")))


def _tensor(name: Any, entry: Any, storage: dict[MetadataIndex, Any]) -> tuple[str, TensorStorageMetadata]:
    name = _text(name)
    if isinstance(entry, Call) and entry.function == Global(_METADATA, "BytesStorageMetadata"):
        raise _refused("an object that is no tensor", name)
    fields = _state(entry, _METADATA, "TensorStorageMetadata")
    size, dtype = _size(fields.get("size")), _dtype(fields.get("properties"))
    chunks = fields.get("chunks")
    if type(chunks) is not list or len(chunks) > len(storage):
        raise _refused("parts of a tensor", name)
    parts = []
    for chunk in chunks:
        state = _state(chunk, _METADATA, "ChunkStorageMetadata")
        part = ChunkStorageMetadata(_size(state.get("offsets")), _size(state.get("sizes")))
        inside = len(part.offsets) == len(part.sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(part.offsets, part.sizes, size, strict=True)
        )
        place = storage.get(MetadataIndex(name, part.offsets))
        if not inside or place is None or place.length < math.prod(part.sizes) * dtype.itemsize:
            raise _refused("part of a tensor", f"{name} {part}")
        parts.append(part)
    if sum(math.prod(part.sizes) for part in parts) != math.prod(size):
        raise _refused("parts that are not the whole", name)
    if _overlap(parts):
        raise _refused("parts on top of each other", name)
    return name, TensorStorageMetadata(TensorProperties(dtype=dtype), size, parts)


def _overlap(parts: list[ChunkStorageMetadata]) -> bool:
    """Whether two parts of a tensor, one per rank that holds some of it, share an element. Another would be in none,
    and keep what was in memory before.

    Parts are taken in the order in which they begin along the dim with the most beginnings; each is compared with those
    that have not ended there.
    """
    boxes = [(part.offsets, part.sizes) for part in parts if 0 not in part.sizes]
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    dim = max(range(len(boxes[0][0])), key=lambda d: len({offsets[d] for offsets, _ in boxes}))
    active: list[tuple[torch.Size, torch.Size]] = []
    for offsets, sizes in sorted(boxes, key=lambda box: box[0][dim]):
        active = [box for box in active if box[0][dim] + box[1][dim] > offsets[dim]]
        for other, lengths in active:
            if all(a < b + n and b < a + m for a, m, b, n in zip(offsets, sizes, other, lengths, strict=True)):
                return True
        active.append((offsets, sizes))
    return False


def _dtype(properties: Any) -> torch.dtype:
    """The dtype is the first of the fields in the order of `TensorProperties.__getstate__`; the others are not used."""
    state = _made(properties, _METADATA, "TensorProperties").state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, Global) or dtype not in _DTYPES:
        raise _refused("dtype", dtype)
    return _DTYPES[dtype]


def _storage(item: tuple[Any, Any]) -> tuple[MetadataIndex, _StorageInfo]:
    index, info = _state(item[0], _METADATA, "MetadataIndex"), _state(item[1], _FILES, "_StorageInfo")
    if info.get("transform_descriptors") is not None:
        raise _refused("transform of a tensor's bytes", info["transform_descriptors"])
    place = _StorageInfo(_text(info.get("relative_path")), _count(info.get("offset")), _count(info.get("length")))
    return MetadataIndex(_text(index.get("fqn")), _size(index.get("offset"))), place


def _check_file(folder: Path, name: str, end: int) -> None:
    """A file of the folder itself, whatever its name says, that holds `end` bytes.

    Raises:
        IndexFormatError: it is not.
        OSError: it is not there.
    """
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise _refused("file", name)
    path = folder / name
    size = path.stat().st_size
    if path.resolve().parent != folder.resolve() or not path.is_file():
        raise _refused("file", f"{name}, which is no file of this folder")
    if size < end:
        raise _refused("file", f"{name}, which has {size} bytes and needs {end}")


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) is not dict:
        raise _refused("table", value)
    yield from value.items()


def _made(value: Any, module: str, name: str) -> Call:
    if not isinstance(value, Call) or value.function != Global(module, name):
        raise _refused(f"object where {name} must be", value)
    return value


def _state(value: Any, module: str, name: str) -> dict[str, Any]:
    state = _made(value, module, name).state
    if type(state) is not dict:
        raise _refused(f"content of {name}", state)
    return state


def _size(value: Any) -> torch.Size:
    made = _made(value, "torch", "Size")
    if len(made.args) != 1 or type(made.args[0]) is not tuple or len(made.args[0]) > _MAX_DIMS:
        raise _refused("size", made.args)
    return torch.Size([_count(dim) for dim in made.args[0]])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise _refused("number", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _refused("name", value)
    return value


def _refused(what: str, value: Any) -> IndexFormatError:
    """The value shortened; containers are not shown, since a shared one can unfold without end."""
    shown = value.function if isinstance(value, Call) else value
    shown = type(shown).__name__ if isinstance(shown, (dict, list, tuple)) else str(shown)[:200]
    return IndexFormatError(f"{INDEX} is not read: {what}: {shown}")

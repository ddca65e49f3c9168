"""The index of a checkpoint, `index.json`: dtype and shape of each tensor, and the file and bytes of each part of it.

`torch.distributed.checkpoint` (DCP) writes the same as a pickle, `.metadata`, which other tools read; reading one runs
whatever was put there, so nothing here does. Each field is checked, and DCP's objects are made from numbers and names.
DCP then reads the tensors with `torch.load(weights_only=True)`.
"""

import io
import math
import os
import zipfile
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX = "index.json"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_Count = Annotated[int, Field(ge=0, le=1 << 62)]
_Size = Annotated[tuple[_Count, ...], Field(max_length=64)]


class _Part(BaseModel):
    """A stored part of a tensor: where it begins in the tensor, its shape, and the bytes of a file that hold it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    offsets: _Size
    sizes: _Size
    file: str
    offset: _Count
    length: _Count


class _Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    dtype: str
    size: _Size
    parts: tuple[_Part, ...]


_INDEX = TypeAdapter(dict[str, _Tensor])


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
        """Read the metadata for DCP: the index of tensors.

        Raises:
            IndexFormatError: it is not one, or names what is no file of this folder.
            OSError: it cannot be read.
        """
        metadata = read_index(self._folder)
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            _check_file(self._folder, name, end)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        """The bytes of one tensor by the index. A compressed record is refused: torch does not write it, and it could
        unfold."""
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
        """Load bytes by the index of tensors: refused, since DCP unpickles here."""
        raise IndexFormatError(f"{read_item.dest_index.fqn} is no tensor")


def index_of(metadata: Metadata) -> bytes:
    """The bytes of the index of the tensors that DCP has written."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise AssertionError(f"{name} is no tensor")
        parts = []
        for chunk in entry.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            where = {"file": place.relative_path, "offset": place.offset, "length": place.length}
            parts.append(_Part(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), **where))
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = _Tensor(dtype=dtype, size=tuple(entry.size), parts=tuple(parts))
    return _INDEX.dump_json(tensors)


def read_index(folder: Path) -> Metadata:
    """Read the index of tensors of a checkpoint: see `parse_index`.

    Raises:
        IndexFormatError: there is none, or it is not one.
        OSError: it cannot be read.
    """
    if not (folder / INDEX).is_file():
        raise IndexFormatError(f"{INDEX} is missing: the checkpoint was not written by tilewright")
    return parse_index((folder / INDEX).read_bytes())


def parse_index(data: bytes) -> Metadata:
    """Read DCP's objects from the bytes of a checkpoint's index of tensors.

    Raises:
        IndexFormatError: for any other bytes.
    """
    try:
        tensors = _INDEX.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refused(".".join(map(str, first["loc"])) or "the whole", first["msg"]) from error
    storage: dict[MetadataIndex, _StorageInfo] = {}
    entries: dict[str, STORAGE_TYPES] = {name: _entry(name, tensor, storage) for name, tensor in tensors.items()}
    return Metadata(entries, {name: (name,) for name in tensors}, storage)


def _entry(name: str, tensor: _Tensor, storage: dict[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    if tensor.dtype not in _DTYPES:
        raise _refused("dtype", tensor.dtype)
    dtype, chunks = _DTYPES[tensor.dtype], []
    for part in tensor.parts:
        inside = len(part.offsets) == len(part.sizes) == len(tensor.size) and all(
            offset + length <= whole
            for offset, length, whole in zip(part.offsets, part.sizes, tensor.size, strict=True)
        )
        if not inside or part.length < math.prod(part.sizes) * dtype.itemsize:
            raise _refused("part of a tensor", f"{name} {part}")
        chunks.append(ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)))
        storage[MetadataIndex(name, part.offsets)] = _StorageInfo(part.file, part.offset, part.length)
    if sum(math.prod(part.sizes) for part in tensor.parts) != math.prod(tensor.size):
        raise _refused("parts that are not the whole", name)
    if len({chunk.offsets for chunk in chunks}) < len(chunks) or _overlap(chunks):
        raise _refused("parts on top of each other", name)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.size), chunks)


def _overlap(parts: list[ChunkStorageMetadata]) -> bool:
    """True where two parts of a tensor in the index, one per rank that holds some of it, share an element. Another
    would be in none, and keep what was in memory before.

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


def _check_file(folder: Path, name: str, end: int) -> None:
    """Check a file that the index of tensors names: one of the folder itself, whatever its name says, that holds `end`
    bytes.

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


def _refused(what: str, value: str) -> IndexFormatError:
    return IndexFormatError(f"{INDEX} is not read: {what}: {value[:200]}")

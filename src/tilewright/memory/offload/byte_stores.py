"""Where bytes lie that are not on the device: host memory, or a file. Rooms of exact sizes, each under a key.

    store = make_store("disk", device, folder)
    store.take({"layers.0": size_a, "layers.1": size_b})  # all of them, or none
    store.write("layers.0", [bytes_a, bytes_b])  # pieces one after another
    store.read("layers.0", [bytes_a, bytes_b])
    store.give_back(["layers.0"])  # to the system, not only to this object

A store knows keys and bytes, nothing about tensors and layer groups. All pieces are flat uint8 tensors in host memory.
On the host each room is an allocation. On disk all are in one file without a name: it is gone from its folder as soon
as it is made, so no other program can remove, cut or reuse it, and however this process ends, `kill -9` included, its
room is free again. It is a cache; the checkpoint is the truth. Pages of it that the system keeps in memory are not this
process' own. Threads may read and write rooms that do not overlap, also while another takes room.

Parameters and states (`pool`), layer inputs (`activation_stores`), the rollback buffer and the measurement of
`bandwidth` use it."""

import ctypes
import errno
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from tilewright.core.config.recipe import Tier
from tilewright.core.errors import ConfigError, FitError, HardwareError, TilewrightError
from tilewright.core.units import format_bytes
from tilewright.memory.offload.pinned_memory import pinned_empty, unpin

_PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
_MAX_PIECES = 1024
"""Pieces in one system call (IOV_MAX of Linux)."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store(ABC):
    """A store of bytes off the device. `in_memory`: the processor can reach them, by `view`."""

    in_memory: bool

    def __init__(self) -> None:
        self.sizes: dict[Hashable, int] = {}
        """Bytes of each room."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all rooms of a byte store."""
        return sum(self.sizes.values())

    @abstractmethod
    def take(self, sizes: Mapping[Hashable, int]) -> None:
        """Take rooms of so many bytes in the byte store under new keys.

        Raises:
            FitError: they are not all there; none is taken then.
            HardwareError: the disk fails, or the memory cannot be page-locked.
        """

    def fit(self, key: Hashable, num_bytes: int, idle: Callable[[], None]) -> None:
        """Make a room of at least `num_bytes` for a key in the byte store. A room that is too small is replaced, its
        bytes lost.

        Args:
            idle: waits until nothing reads or writes the room; called before it is replaced.
        """
        if key in self.sizes:
            if self.sizes[key] >= num_bytes:
                return
            idle()
            self.give_back([key])
        self.take({key: num_bytes})

    @abstractmethod
    def give_back(self, keys: Collection[Hashable]) -> None:
        """Return rooms of the byte store to the system. Nothing may be reading or writing them any more."""

    @abstractmethod
    def read(self, key: Hashable, pieces: Sequence[Tensor]) -> None:
        """Read from the byte store: copy a room's first bytes into `pieces`.

        Raises:
            HardwareError: the disk fails, or the file is shorter than it was made.
        """

    @abstractmethod
    def write(self, key: Hashable, pieces: Sequence[Tensor]) -> None:
        """Write to the byte store: copy `pieces` to a room's first bytes.

        Raises:
            HardwareError: the disk fails, or is full after all.
        """

    @abstractmethod
    def view(self, key: Hashable) -> Tensor:
        """View the bytes of a room of the byte store on the host."""

    @abstractmethod
    def close(self) -> None:
        """Close the byte store: free all its rooms."""


def make_store(tier: Tier, device: torch.device, folder: Path | str | None = None) -> Store:
    """Make a byte store without rooms in a tier off the device.

    Args:
        tier: host or disk.
        device: what the bytes travel to; memory for a GPU is page-locked.
        folder: of the disk tier; made where it is missing.

    Raises:
        ConfigError: the folder cannot be written.
    """
    if tier == "host":
        return HostStore(device)
    if tier != "disk" or folder is None:
        raise AssertionError(f"a store is on host, or on disk in a folder; got {tier=}, {folder=}")
    return DiskStore(Path(folder))


class HostStore(Store):
    """A byte store in host memory: an allocation of exactly its size per room, which a GPU reaches directly."""

    in_memory = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._rooms: dict[Hashable, Tensor] = {}

    def take(self, sizes: Mapping[Hashable, int]) -> None:
        # All at once before: the system refuses an allocation larger than its memory, and not the last one of many.
        pinned_empty(sum(sizes.values()), torch.device("cpu"))
        try:
            for key, size in sizes.items():
                self._rooms[key] = pinned_empty(size, self._device)
                self.sizes[key] = size
        except BaseException:
            self.give_back(sizes.keys() & self._rooms.keys())
            raise

    def give_back(self, keys: Collection[Hashable]) -> None:
        for key in keys:
            self.sizes.pop(key, None)
            unpin(self._rooms.pop(key), self._device)

    def view(self, key: Hashable) -> Tensor:
        return self._rooms[key]

    def read(self, key: Hashable, pieces: Sequence[Tensor]) -> None:
        for piece, part in self._parts(key, pieces):
            _copy_bytes(part, piece)

    def write(self, key: Hashable, pieces: Sequence[Tensor]) -> None:
        for piece, part in self._parts(key, pieces):
            _copy_bytes(piece, part)

    def _parts(self, key: Hashable, pieces: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Divide a room of the host's byte store into pieces, each with its bytes."""
        sizes = [len(piece) for piece in pieces]
        return list(zip(pieces, self._rooms[key][: sum(sizes)].split(sizes), strict=True))

    def close(self) -> None:
        self.give_back(list(self._rooms))


class DiskStore(Store):
    """A file as a store, without a name in `folder`, in which each room has its blocks from the start."""

    in_memory = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._file = _open_nameless(folder)
        self._starts: dict[Hashable, int] = {}
        self._held = self._end = 0

    def take(self, sizes: Mapping[Hashable, int]) -> None:
        try:
            for key, size in sizes.items():
                start = self._gap(size)
                self._starts[key], self.sizes[key] = start, size
                self._held, self._end = self._held + size, max(self._end, start + size)
                if size:
                    os.posix_fallocate(self.fileno(), start, size)
        except OSError as error:
            self.give_back(sizes.keys() & self.sizes.keys())
            raise self._failed("extended", error, sum(sizes.values())) from error

    def give_back(self, keys: Collection[Hashable]) -> None:
        """Return rooms of the disk's byte store: the file ends with its last room; before that, a room becomes a hole.
        Where the file system makes no holes, the next rooms are taken there.

        Raises:
            HardwareError: the disk fails.
        """
        gone = [(self._starts.pop(key), self.sizes.pop(key)) for key in keys]
        self._held -= sum(size for _, size in gone)
        self._end = max((start + self.sizes[key] for key, start in self._starts.items()), default=0)
        try:
            if os.fstat(self.fileno()).st_size > self._end:
                os.truncate(self.fileno(), self._end)
            for start, size in gone:
                if start < self._end and size:
                    self._punch_hole(start, size)
        except OSError as error:
            raise self._failed("returned", error) from error

    def view(self, key: Hashable) -> Tensor:
        raise AssertionError("bytes on disk cannot be looked at")

    def read(self, key: Hashable, pieces: Sequence[Tensor]) -> None:
        self._move(os.preadv, "read", key, pieces)

    def write(self, key: Hashable, pieces: Sequence[Tensor]) -> None:
        self._move(os.pwritev, "written", key, pieces)

    def fileno(self) -> int:
        """The open file of the byte store on disk."""
        return self._file.fileno()

    def sync(self) -> None:
        """Wait until the disk itself has what was written to the byte store."""
        os.fsync(self.fileno())

    def forget_cached(self) -> None:
        """Let the system drop its copies in memory of the byte store's file."""
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()
        self._starts.clear()
        self.sizes.clear()
        self._held = self._end = 0

    def _gap(self, num_bytes: int) -> int:
        """A gap in the byte store on disk, where there is room for so many bytes: the first gap between rooms that they
        fit into, or the end."""
        end = self._end if self._held == self._end else 0
        if end < self._end:
            for key, start in sorted(self._starts.items(), key=lambda room: room[1]):
                if start - end >= num_bytes:
                    break
                end = max(end, start + self.sizes[key])
        return end

    def _punch_hole(self, start: int, num_bytes: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(self.fileno(), _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(num_bytes))
        if done != 0 and (fault := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(fault, os.strerror(fault))

    def _move(self, call: Callable[..., int], done: str, key: Hashable, pieces: Sequence[Tensor]) -> None:
        """Call until all bytes have moved: the system may move fewer than it was asked to."""
        at = self._starts[key]
        views = [piece.numpy().data for piece in pieces if len(piece)]
        while views:
            try:
                count = call(self.fileno(), views[:_MAX_PIECES], at)
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends at byte {at} of {self._end}")
            except OSError as error:
                raise self._failed(done, error) from error
            at += count
            views = _after(views, count)

    def _failed(self, done: str, error: OSError, wanted: int | None = None) -> TilewrightError:
        """The error of the byte store on disk; `wanted`: bytes of room that could not be taken."""
        reason = error.strerror or str(error)
        if wanted is not None and error.errno in _FULL:
            return FitError(
                "Disk is full: no room for the offloaded tensors",
                got=f"{reason}; {format_bytes(shutil.disk_usage(self.folder).free)} free",
                need=f"{format_bytes(wanted)} more in this folder",
                try_="free space, memory.offload_dir = a folder on a larger disk, or another tier",
                where=str(self.folder),
            )
        return HardwareError(
            f"Offload file cannot be {done}",
            got=reason,
            need="a disk that keeps the room that it gave at the start",
            try_="mend the disk, free space or set memory.offload_dir, and start the run again: "
            "it continues from its newest checkpoint, the tier holds nothing else",
            where=str(self.folder),
        )


def _open_nameless(folder: Path) -> BinaryIO:
    """Open a nameless file for a byte store: a new one in `folder`, which is made where it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, prefix="tier-", buffering=0)
    except OSError as error:
        raise ConfigError(
            "Offload folder cannot be written",
            got=str(error),
            need="a folder that this user may create files in",
            try_="memory.offload_dir = a folder on a fast local disk",
            where=str(folder),
        ) from error


def _copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy a byte store's flat uint8 tensors in host memory on one core, without Python's lock.

    torch's copy would start threads of its own beside those that compute.
    """
    np.copyto(target.numpy(), source.numpy())


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """The rest of `views` after their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []

"""Where bytes lie that are not on the device: host memory, or a file. Sizes are exact and taken at construction.

    store = make_store("disk", num_bytes, folder=folder, device=device)
    store.write(offset, [bytes_a, bytes_b])     # pieces one after another
    store.read(offset, [bytes_a, bytes_b])

A store knows offsets, nothing about tensors and slices. All pieces are flat uint8 tensors in host memory. The file has
no name: it is gone from its folder as soon as it is made, so nobody can remove, cut or reuse it, and whatever becomes
of this process, `kill -9` included, its room is free again. It is a cache; the checkpoint is the truth. Pages of it
that the system keeps in memory are not this process' own. Calls from several threads are fine where they do not
overlap.

Called by `transfer` and `arena`.
"""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import torch
from torch import Tensor

from tilewright.core.config import Tier
from tilewright.core.errors import ConfigError, FitError, HardwareError, TilewrightError
from tilewright.core.units import format_bytes
from tilewright.memory.pinned import pinned_empty, unpin

_PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE of linux/falloc.h."""
_MAX_PIECES = 1024
"""Pieces in one system call (IOV_MAX of Linux)."""


class Store(Protocol):
    """Bytes off the device. `in_memory`: the processor can reach them, by `view`."""

    in_memory: bool

    @property
    def num_bytes(self) -> int: ...

    def read(self, offset: int, pieces: Sequence[Tensor]) -> None: ...

    def write(self, offset: int, pieces: Sequence[Tensor]) -> None: ...

    def view(self, offset: int, num_bytes: int) -> Tensor: ...

    def close(self) -> None: ...


def make_store(tier: Tier, num_bytes: int, *, device: torch.device, folder: Path | str | None = None) -> Store:
    """Room for `num_bytes` in a tier off the device.

    Args:
        tier: host or disk.
        num_bytes: taken now, all of it.
        device: what the bytes travel to; memory for a GPU is page-locked.
        folder: of the disk tier; made where it is missing.

    Raises:
        FitError: so much is not there.
        ConfigError: the folder cannot be written.
        HardwareError: the memory cannot be page-locked.
    """
    if tier == "host":
        return HostStore(num_bytes, device)
    if tier != "disk" or folder is None:
        raise AssertionError(f"a store is on host, or on disk in a folder; got {tier=}, {folder=}")
    return DiskStore(num_bytes, Path(folder))


class HostStore:
    """One allocation of exactly `num_bytes`, which a GPU reaches directly."""

    in_memory = True

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._device = device
        try:
            self.memory: Tensor | None = pinned_empty(num_bytes, device)
        except RuntimeError as error:  # torch's allocator has no class of its own for it
            raise no_host_memory(num_bytes) from error

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """The bytes themselves."""
        assert self.memory is not None, "the store is closed"
        return self.memory[offset : offset + num_bytes]

    def read(self, offset: int, pieces: Sequence[Tensor]) -> None:
        """Copy into `pieces` what lies from `offset` on."""
        for piece in pieces:
            copy_bytes(self.view(offset, len(piece)), piece)
            offset += len(piece)

    def write(self, offset: int, pieces: Sequence[Tensor]) -> None:
        """Copy `pieces` to `offset` and on."""
        for piece in pieces:
            copy_bytes(piece, self.view(offset, len(piece)))
            offset += len(piece)

    def close(self) -> None:
        """Give the memory back."""
        if self.memory is not None:
            unpin(self.memory, self._device)
        self.memory = None


class DiskStore:
    """A file without a name in `folder`, its room taken at construction."""

    in_memory = False

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self.num_bytes = num_bytes
        self.folder = folder
        self._file = open_nameless(folder)
        try:
            if num_bytes:
                os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            self._file.close()
            raise self._no_room(error) from error

    def read(self, offset: int, pieces: Sequence[Tensor]) -> None:
        """Read into `pieces` what lies from `offset` on.

        Raises:
            HardwareError: the disk fails, or the file is shorter than it was made.
        """
        self._move(os.preadv, "read", offset, pieces)

    def write(self, offset: int, pieces: Sequence[Tensor]) -> None:
        """Write `pieces` to `offset` and on.

        Raises:
            HardwareError: the disk fails, or is full after all.
        """
        self._move(os.pwritev, "written", offset, pieces)

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """Not on a disk."""
        raise AssertionError("bytes on disk cannot be looked at")

    def fileno(self) -> int:
        """The open file."""
        return self._file.fileno()

    def punch_hole(self, offset: int, num_bytes: int) -> None:
        """Give the blocks of a stretch back to the file system; the file's size stays. Nothing on one without holes.

        Raises:
            HardwareError: the disk fails.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        done = libc.fallocate(self.fileno(), _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes))
        if done != 0 and (fault := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise self._failed("given back", os.strerror(fault))

    def sync(self) -> None:
        """Wait until the disk itself has what was written."""
        os.fsync(self._file.fileno())

    def forget_cached(self) -> None:
        """Let the system drop its copies in memory of what is on the disk."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the room back."""
        self._file.close()

    def _move(self, call: Callable[..., int], done: str, offset: int, pieces: Sequence[Tensor]) -> None:
        """Call until all bytes went over: the system may move fewer than it was asked to."""
        views = [memoryview(piece.numpy()) for piece in pieces if len(piece)]
        while views:
            try:
                count = call(self._file.fileno(), views[:_MAX_PIECES], offset)
            except OSError as error:
                raise self._failed(done, str(error)) from error
            if count == 0:
                raise self._failed(done, f"the file ends at byte {offset} of {self.num_bytes}")
            offset += count
            views = _after(views, count)

    def _no_room(self, error: OSError) -> TilewrightError:
        free = shutil.disk_usage(self.folder).free
        return FitError(
            "The disk tier does not fit on its disk.",
            got=f"{error.strerror}; {format_bytes(free)} free",
            need=f"{format_bytes(self.num_bytes)} in this folder",
            try_="free space, or memory.tier_dir = a folder on a larger disk",
            where=str(self.folder),
        )

    def _failed(self, done: str, reason: str) -> TilewrightError:
        return HardwareError(
            f"The disk tier cannot be {done}.",
            got=reason,
            need="a disk that keeps the room that it gave at the start",
            try_="mend the disk, free space or set memory.tier_dir, and start the run again: "
            "it goes on from its newest checkpoint, the tier holds nothing else",
            where=str(self.folder),
        )


def no_host_memory(num_bytes: int) -> FitError:
    """What the user is told where the system has not so much memory."""
    return FitError(
        "The host tier does not fit into memory.",
        got=f"no {format_bytes(num_bytes)} from the system",
        need=f"{format_bytes(num_bytes)} of free host memory",
        try_='memory.states = "disk" or memory.parameters = "disk", or a smaller model',
        where="memory",
    )


def open_nameless(folder: Path) -> BinaryIO:
    """A new file without a name in `folder`, which is made where it is missing.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder, prefix="tier-", buffering=0)
    except OSError as error:
        raise ConfigError(
            "The folder of the disk tier cannot be written.",
            got=str(error),
            need="a folder that this user may create files in",
            try_="memory.tier_dir = a folder on a fast local disk",
            where=str(folder),
        ) from error


def copy_bytes(source: Tensor, target: Tensor) -> None:
    """Copy flat uint8 tensors in host memory on one core, without Python's lock.

    torch's copy would start threads of its own beside those that compute.
    """
    np.copyto(target.numpy(), source.numpy())


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `views` without their first `count` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []

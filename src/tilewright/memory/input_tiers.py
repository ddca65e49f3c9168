"""Where `inputs` keeps its bytes: on the device, in registered host memory, in a file. All three have one interface.

put(key, tensors)    keep these contiguous tensors
prefetch(key)        begin to bring them back
get(key)             the tensors on the device
drop(key)            let go of them
"""

import errno
import os
from collections import deque
from collections.abc import Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tilewright.core.errors import FitError, HardwareError, TilewrightError
from tilewright.core.units import format_bytes
from tilewright.memory.pinned import pinned_empty, unpin
from tilewright.memory.tiers import open_nameless

Key = tuple[int, int]
Result = TypeVar("Result")
MAX_UNDER_WAY = 2
"""Tensors being written at once: they stay in memory until they are."""


class DeviceTier:
    """Keeps the tensors as they are."""

    def __init__(self) -> None:
        self._kept: dict[Key, Sequence[Tensor]] = {}

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self._kept[key] = tensors

    def prefetch(self, key: Key) -> None:
        """Nothing to do."""

    def get(self, key: Key) -> Sequence[Tensor]:
        return self._kept[key]

    def drop(self, key: Key) -> None:
        del self._kept[key]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._kept.values() for tensor in tensors)

    def close(self) -> None:
        self._kept.clear()


class HostTier:
    """Copies to and from registered host memory on streams of their own.

    A key's buffers are kept for the next step, and replaced where they are too small.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[Key, int], Tensor] = {}
        self._kept: dict[Key, list[Tensor]] = {}
        self._coming: dict[Key, tuple[torch.cuda.Event, list[Tensor]]] = {}
        self._going: deque[tuple[torch.cuda.Event, Sequence[Tensor]]] = deque()
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        while self._going and (len(self._going) >= MAX_UNDER_WAY or self._going[0][0].query()):
            self._going.popleft()[0].synchronize()
        places = [self._place(key, number, tensor) for number, tensor in enumerate(tensors)]
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            self._going.append((self._down.record_event(), tensors))  # alive until they are copied
        self._kept[key] = places

    def prefetch(self, key: Key) -> None:
        if key in self._coming:
            return
        # Made on the stream that will use them; the copies wait for what may still read that memory.
        arrived = [torch.empty_like(place, device=self._device) for place in self._kept[key]]
        self._up.wait_stream(torch.cuda.current_stream(self._device))
        self._up.wait_stream(self._down)
        with torch.cuda.stream(self._up):
            for tensor, place in zip(arrived, self._kept[key], strict=True):
                tensor.copy_(place, non_blocking=True)
            self._coming[key] = (self._up.record_event(), arrived)

    def get(self, key: Key) -> Sequence[Tensor]:
        self.prefetch(key)
        event, tensors = self._coming.pop(key)
        torch.cuda.current_stream(self._device).wait_event(event)
        return tensors

    def drop(self, key: Key) -> None:
        del self._kept[key]
        if key in self._coming:
            self._coming.pop(key)[0].synchronize()

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def layers(self) -> set[int]:
        """The layers that buffers are kept for."""
        return {layer for (layer, _), _ in self._buffers}

    def forget(self, layers: Set[int]) -> None:
        """Give the buffers of these layers back; nothing of theirs is kept."""
        if not layers:
            return
        torch.cuda.synchronize(self._device)
        for place in [place for place in self._buffers if place[0][0] in layers]:
            unpin(self._buffers.pop(place), self._device)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._kept.clear()
        self._coming.clear()
        self._going.clear()
        for buffer in self._buffers.values():
            unpin(buffer, self._device)
        self._buffers.clear()

    def _place(self, key: Key, number: int, tensor: Tensor) -> Tensor:
        """Host memory in the form of a tensor."""
        buffer = self._buffers.get((key, number))
        if buffer is None or buffer.nbytes < tensor.nbytes:
            if buffer is not None:
                torch.cuda.synchronize(self._device)
                unpin(self._buffers.pop((key, number)), self._device)
            buffer = self._buffers[key, number] = pinned_empty(tensor.nbytes, self._device)
        return buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass
class _Region:
    """A piece of the file, and what it holds."""

    start: int
    tensors: list[tuple[torch.Size, torch.dtype]]
    num_bytes: int
    coming: Future[list[Tensor]] | None = None


class DiskTier:
    """One file, written and read by a thread in the order of the calls.

    The file has no name, so nothing is left of it however the process ends. It grows in the first step; space is taken
    before bytes are written, so a full disk is found by `put` and not by the thread.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device, self._folder = device, folder
        self._file = open_nameless(folder)
        self._regions: dict[Key, _Region] = {}
        self._end = self._size = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layer-inputs")
        self._writes: deque[Future[None]] = deque()

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self._settle(MAX_UNDER_WAY - 1)
        if not self._regions:
            self._end = 0  # a new step: from the start of the file again
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        arrays = [_bytes_of(tensor.cpu()) for tensor in tensors]
        region = _Region(self._end, [(tensor.shape, tensor.dtype) for tensor in tensors], num_bytes)
        self._grow(self._end + num_bytes)
        self._regions[key] = region
        self._end += num_bytes
        self._writes.append(self._thread.submit(self._write, arrays, region.start))

    def prefetch(self, key: Key) -> None:
        region = self._regions[key]
        if region.coming is None:
            region.coming = self._thread.submit(self._read, region)

    def get(self, key: Key) -> Sequence[Tensor]:
        self.prefetch(key)
        region = self._regions[key]
        coming, region.coming = region.coming, None
        tensors = self._wait(coming)
        self._settle(len(self._writes))  # one that failed has left no data for this read
        return [tensor.to(self._device) for tensor in tensors]

    def drop(self, key: Key) -> None:
        region = self._regions.pop(key)
        if region.coming is not None:
            region.coming.cancel()

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self._regions.values())

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._regions.clear()
        self._file.close()

    def _settle(self, most: int) -> None:
        """Take note of writes that ended, and wait until at most so many are under way."""
        while len(self._writes) > most or (self._writes and self._writes[0].done()):
            self._wait(self._writes.popleft())

    def _wait(self, future: Future[Result]) -> Result:
        try:
            return future.result()
        except OSError as error:
            raise disk_error(error, self._folder) from error

    def _grow(self, size: int) -> None:
        if size <= self._size:
            return
        try:
            os.posix_fallocate(self._file.fileno(), self._size, size - self._size)
        except OSError as error:
            raise disk_error(error, self._folder, size) from error
        self._size = size

    def _write(self, arrays: Sequence[memoryview], start: int) -> None:
        for array in arrays:
            done = 0
            while done < len(array):
                done += os.pwrite(self._file.fileno(), array[done:], start + done)
            start += len(array)

    def _read(self, region: _Region) -> list[Tensor]:
        tensors, start = [], region.start
        for shape, dtype in region.tensors:
            tensor = torch.empty(shape, dtype=dtype)
            array, done = _bytes_of(tensor), 0
            while done < len(array):
                read = os.preadv(self._file.fileno(), [array[done:]], start + done)
                if read == 0:
                    raise OSError(errno.EIO, "the file is shorter than what was written")
                done += read
            start += len(array)
            tensors.append(tensor)
        return tensors


def disk_error(error: OSError, folder: Path, num_bytes: int | None = None) -> TilewrightError:
    """What the user is told where the disk tier fails."""
    told = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        wanted = f", with {format_bytes(num_bytes)} needed in all" if num_bytes is not None else ""
        return FitError(
            "The disk tier is full.",
            got=f"{told}{wanted}",
            need="space for what the recipe keeps on disk",
            try_="memory.tier_dir in a larger file system, or another tier",
            where=str(folder),
        )
    return HardwareError(
        "The disk tier cannot be used.",
        got=told,
        need="a folder on a local disk that this process may read and write",
        try_="another memory.tier_dir, or another tier",
        where=str(folder),
    )


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, not copied."""
    return memoryview(tensor.view(torch.uint8).reshape(-1).numpy()) if tensor.numel() else memoryview(b"")

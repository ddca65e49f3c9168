"""Where `activations` keeps its bytes: on the device, in registered host memory, in a file. All three have one
interface.

    put(key, tensors)    keep these contiguous tensors
    prefetch(key)        begin to bring them back
    get(key)             the tensors on the device
    drop(key)            they are of no use any more
    forget(gone)         return the room of layers for which gone(layer)
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tilewright.memory.offload.byte_stores import DiskStore, HostStore, Store
from tilewright.memory.offload.flat_layout import Layout
from tilewright.memory.offload.pinned_memory import PinnedBuffers

Key = tuple[int, int]
"""Number of the layer and of the micro-batch."""
Event = torch.cuda.Event | torch.Event
MAX_UNDER_WAY = 2
"""Tensors being written at once: they stay in memory until they are."""


class DeviceActivations:
    """Keeps the layer inputs on the device, as they are."""

    def __init__(self) -> None:
        self._kept: dict[Key, Sequence[Tensor]] = {}

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self._kept[key] = tensors

    def prefetch(self, key: Key) -> None:
        """Do nothing: the activations of this store are on the device already."""

    def get(self, key: Key) -> Sequence[Tensor]:
        return self._kept[key]

    def drop(self, key: Key) -> None:
        del self._kept[key]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._kept.values() for tensor in tensors)

    def forget(self, gone: Callable[[int], bool]) -> None:
        """Do nothing: the activation store on the device frees its memory by itself."""

    def close(self) -> None:
        self._kept.clear()


class _InStore:
    """Keeps the tensors in a store. A key's room is kept for the next step, and replaced where it is too small."""

    store: Store

    def forget(self, gone: Callable[[int], bool]) -> None:
        keys = [key for key in cast(Iterable[Key], self.store.sizes) if gone(key[0])]
        if keys:
            self.idle()
            self.store.give_back(keys)

    def idle(self) -> None:
        """Wait until nothing reads or writes the activation store."""
        raise NotImplementedError


class HostActivations(_InStore):
    """Keeps layer inputs in registered host memory: copies to and from it run on streams of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.store = HostStore(device)
        self._kept: dict[Key, list[Tensor]] = {}
        self._coming: dict[Key, tuple[Event, list[Tensor]]] = {}
        self._going: deque[tuple[Event, Sequence[Tensor]]] = deque()
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        while self._going and (len(self._going) >= MAX_UNDER_WAY or self._going[0][0].query()):
            self._going.popleft()[0].synchronize()
        layout = _layout(tensors)
        self.store.fit(key, layout.num_bytes, self.idle)
        places = list(layout.views(self.store.view(key)).values())
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
        return self.store.num_bytes

    def idle(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.idle()
        self._kept.clear()
        self._coming.clear()
        self._going.clear()
        self.store.close()


class DiskActivations(_InStore):
    """Keeps layer inputs in a file, which a thread writes and reads in the order of the calls.

    Space is taken before bytes are written, so a full disk is found by `put` and not by the thread.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        self.store = DiskStore(folder)
        self._kept: dict[Key, list[tuple[torch.Size, torch.dtype]]] = {}
        self._coming: dict[Key, Future[list[Tensor]]] = {}
        self._writes: deque[Future[None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layer-inputs")

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self._settle(MAX_UNDER_WAY - 1)
        pieces = [_flat(tensor.cpu()) for tensor in tensors]
        self.store.fit(key, sum(map(len, pieces)), self.idle)
        self._kept[key] = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._writes.append(self._thread.submit(self.store.write, key, pieces))

    def prefetch(self, key: Key) -> None:
        if key not in self._coming:
            self._coming[key] = self._thread.submit(self._read, key, self._kept[key])

    def get(self, key: Key) -> Sequence[Tensor]:
        self.prefetch(key)
        tensors = self._coming.pop(key).result()
        self._settle(len(self._writes))  # one that failed has left no data for this read
        return [tensor.to(self._device) for tensor in tensors]

    def drop(self, key: Key) -> None:
        del self._kept[key]
        if key in self._coming:
            self._coming.pop(key).cancel()

    @property
    def num_bytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for kept in self._kept.values() for shape, dtype in kept)

    def idle(self) -> None:
        self._settle(0)
        self._thread.submit(lambda: None).result()  # after reads that are of no use any more

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._kept.clear()
        self.store.close()

    def _settle(self, most: int) -> None:
        """Note the writes of the activation store on disk that ended, and wait until at most `most` are under way."""
        while len(self._writes) > most or (self._writes and self._writes[0].done()):
            self._writes.popleft().result()

    def _read(self, key: Key, kept: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kept]
        self.store.read(key, [_flat(tensor) for tensor in tensors])
        return tensors


class CudaDiskActivations(DiskActivations):
    """A disk store for a GPU: a thread moves bytes between the file and registered host memory, and two streams beside
    the computation's copy from and to that.

    At most `MAX_UNDER_WAY` tensors are on their way to the file, and one on its way back, so there are as many host
    buffers, of the largest tensors.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        super().__init__(folder, device)
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._buffers = PinnedBuffers(device)

    def put(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self._settle(MAX_UNDER_WAY - 1)
        layout = _layout(tensors)
        self.store.fit(key, layout.num_bytes, self.idle)
        buffer = self._buffers.take(layout.num_bytes)
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for place, tensor in zip(layout.views(buffer).values(), tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
            copied = self._down.record_event()
        self._kept[key] = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._writes.append(self._thread.submit(self._write, key, buffer[: layout.num_bytes], copied, tensors))
        self._writes[-1].add_done_callback(lambda _: self._buffers.give(buffer))

    def prefetch(self, key: Key) -> None:
        if key not in self._coming:
            # Made on the stream that will use them; the copies wait for what may still read that memory.
            arrived = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._kept[key]]
            before = torch.cuda.current_stream(self._device).record_event()
            self._coming[key] = self._thread.submit(self._fetch, key, arrived, before)

    def close(self) -> None:
        super().close()
        self._down.synchronize()  # what was cancelled is still copied
        self._buffers.close()

    def _write(self, key: Key, flat: Tensor, copied: Event, _: Sequence[Tensor]) -> None:
        """Write to the activation store on disk from CUDA. `_`: alive until they are copied."""
        copied.synchronize()
        self.store.write(key, [flat])

    def _fetch(self, key: Key, arrived: list[Tensor], before: Event) -> list[Tensor]:
        layout = _layout(arrived)
        buffer = self._buffers.take(layout.num_bytes)
        try:
            self.store.read(key, [buffer[: layout.num_bytes]])
            with torch.cuda.device(self._device), torch.cuda.stream(self._up):
                self._up.wait_event(before)
                for tensor, place in zip(arrived, layout.views(buffer).values(), strict=True):
                    tensor.copy_(place, non_blocking=True)
            self._up.synchronize()
        finally:
            self._buffers.give(buffer)
        return arrived


def _layout(tensors: Sequence[Tensor]) -> Layout:
    return Layout.of({str(number): tensor for number, tensor in enumerate(tensors)})


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor for an activation store, flat, not copied."""
    return tensor.reshape(-1).view(torch.uint8)

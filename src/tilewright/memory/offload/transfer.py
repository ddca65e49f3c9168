"""Copies between the rooms of a store and the staging buffers on the device, in the background.

One thread reads, one writes; each works off its orders in turn, and a read first waits for the writes that it is
reported to wait for. A finished future means: the bytes are where they should be. On a CPU the staging buffer is host
memory, and the store reads right into it. On a GPU the copies run on two streams of their own beside the computation,
the store in memory page-locked, the store on disk through page-locked buffers."""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.memory.offload.byte_stores import Store
from tilewright.memory.offload.pinned_memory import pinned_empty, unpin


@dataclass
class Traffic:
    """Background traffic between store and device, in bytes, and how long the computation stood still for it."""

    read_bytes: int = 0
    written_bytes: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class Buffer:
    """A staging buffer: flat uint8 on the device, and page-locked host memory where a disk and a GPU need a middle."""

    live: Tensor
    bounce: Tensor | None = None

    def close(self) -> None:
        """Close a transfer's buffer: free the host memory; nothing may be copying to or from it any more."""
        if self.bounce is not None:
            unpin(self.bounce, self.live.device)


class Transfer:
    """Copies bytes between a store's rooms and staging buffers in the background, on a CPU; `CudaTransfer` on a GPU.

    Args:
        store: the far end.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.traffic = Traffic()
        self._failure: BaseException | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="tier-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tier-write")

    def make_buffer(self, num_bytes: int) -> Buffer:
        """Make a staging buffer for transfers of exactly this size."""
        return Buffer(torch.empty(num_bytes, dtype=torch.uint8))

    def mark(self) -> torch.cuda.Event | None:
        """Mark the work before a transfer that the device was given so far; what reads or writes a buffer afterwards
        has to wait for it."""
        return None

    def load(
        self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None, after: Sequence[Future[None]]
    ) -> Future[None]:
        """Transfer a store's room to a staging buffer's first bytes, in the background.

        Args:
            mark: of the work that last used the buffer.
            after: writes that must be over first. Where one failed, whatever it was, all loads fail in the same way.
        """
        self.traffic.read_bytes += self.store.sizes[key]
        return self._reader.submit(self._load_after, key, buffer, mark, tuple(after))

    def save(self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None) -> Future[None]:
        """Transfer a staging buffer to a store's room in the background. It must not change before the future is
        done."""
        self.traffic.written_bytes += self.store.sizes[key]
        return self._writer.submit(self._save_or_note, key, buffer, mark)

    def read(self, key: Hashable, host_bytes: Tensor) -> Future[None]:
        """Copy a room into the host's memory, after the loads ordered so far."""
        return self._reader.submit(self._read, key, host_bytes)

    def close(self) -> None:
        """Close the transfers: wait for background copies under way, and end the threads. What failed stays in its
        future."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _load_after(
        self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None, after: tuple[Future[None], ...]
    ) -> None:
        for write in after:
            write.result()
        self._check_no_failure()
        self._load(key, buffer, mark)

    def _read(self, key: Hashable, host_bytes: Tensor) -> None:
        self._check_no_failure()
        self.store.read(key, [host_bytes])

    def _save_or_note(self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None) -> None:
        try:
            self._save(key, buffer, mark)
        except BaseException as error:
            self._failure = error
            raise

    def _check_no_failure(self) -> None:
        """Check that no transfer failed: once something could not be written, the store is not what it should be, and
        nothing is taken from it."""
        if self._failure is not None:
            raise self._failure

    def _load(self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None) -> None:
        self.store.read(key, [buffer.live[: self.store.sizes[key]]])

    def _save(self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None) -> None:
        self.store.write(key, [buffer.live[: self.store.sizes[key]]])


class CudaTransfer(Transfer):
    """Copies bytes in the background for a GPU. Threads wait for their copies; the computation's stream does not."""

    def __init__(self, store: Store, device: torch.device) -> None:
        super().__init__(store)
        self.device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def make_buffer(self, num_bytes: int) -> Buffer:
        """Make a staging buffer for CUDA transfers: see `Transfer`."""
        live = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return Buffer(live, None if self.store.in_memory else pinned_empty(num_bytes, self.device))

    def mark(self) -> torch.cuda.Event | None:
        """Mark the work that a CUDA transfer must follow: see `Transfer`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _load(self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None) -> None:
        host = self._host_bytes(key, buffer)
        if not self.store.in_memory:
            self.store.read(key, [host])
        self._copy(host, buffer.live[: len(host)], self._up, mark)

    def _save(self, key: Hashable, buffer: Buffer, mark: torch.cuda.Event | None) -> None:
        host = self._host_bytes(key, buffer)
        self._copy(buffer.live[: len(host)], host, self._down, mark)
        if not self.store.in_memory:
            self.store.write(key, [host])

    def _host_bytes(self, key: Hashable, buffer: Buffer) -> Tensor:
        """The page-locked memory at the host's end of a CUDA transfer: the store itself, or a buffer in front of the
        disk."""
        if self.store.in_memory:
            return self.store.view(key)
        assert buffer.bounce is not None, "a buffer for a disk has a middle"
        return buffer.bounce[: self.store.sizes[key]]

    def _copy(self, source: Tensor, target: Tensor, stream: torch.cuda.Stream, mark: torch.cuda.Event | None) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            if mark is not None:
                stream.wait_event(mark)
            target.copy_(source, non_blocking=True)
        stream.synchronize()


def make_transfer(store: Store, device: torch.device) -> Transfer:
    """The transfer that copies in the background between store and a device of this kind."""
    return CudaTransfer(store, device) if device.type == "cuda" else Transfer(store)

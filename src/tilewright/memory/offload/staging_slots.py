"""Staging buffers on the device, and which layer group is in which. They rotate: the one used longest ago is filled
next.

    slots.make(transfer, num_bytes, count)
    slots.prefetch(key, transfer)
    flat = slots.fetch(key, transfer)  # the layer group's bytes; may be changed until
    slots.release(key, changed=True)  # written back in the background

A layer group that is released and fetched again before its buffer was needed is not read again.
"""

import time
from collections.abc import Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.memory.offload.transfer import Buffer, Transfer


@dataclass(eq=False)
class StagingBuffer:
    """A staging buffer and what is in it."""

    buffer: Buffer
    holds: Hashable | None = None
    transfer: Transfer | None = None
    """Of the tier that this layer group belongs to."""
    wanted: bool = False
    """Prefetched or live: not free for another layer group."""
    live: bool = False
    loading: Future[None] | None = None
    saving: Future[None] | None = None
    mark: torch.cuda.Event | None = None


class StagingBuffers:
    """Brings layer groups into staging buffers and writes them back."""

    def __init__(self) -> None:
        self.slots: list[StagingBuffer] = []  # the one that was used longest ago first
        self.wait_s = 0.0
        """Seconds that the caller stood still for bytes on their way."""
        self._saves: dict[Hashable, Future[None]] = {}
        """The last time that a layer group was written back."""

    def make(self, transfer: Transfer, num_bytes: int, count: int) -> None:
        """Make this many staging buffers, each for every layer group of at most `num_bytes`."""
        self.slots = [StagingBuffer(transfer.make_buffer(num_bytes)) for _ in range(count)]

    def drop(self) -> None:
        """Drop the staging buffers: `close`, after what is on its way."""
        for slot in self.slots:
            self.wait_for(slot.loading)
            self.wait_for(slot.saving)
        self.close()

    def close(self) -> None:
        """Give the staging buffers back; nothing may be on its way any more."""
        for slot in self.slots:
            slot.buffer.close()
        self.slots = []

    def prefetch(self, key: Hashable, transfer: Transfer) -> bool:
        """Start bringing a layer group into a staging buffer. False if no buffer is free for it."""
        slot = self._of(key) or next((slot for slot in self.slots if not slot.wanted), None)
        if slot is not None:
            self._start(slot, key, transfer)
        return slot is not None

    def fetch(self, key: Hashable, transfer: Transfer) -> Tensor:
        """Return the staging buffer with a layer group's bytes on the device. If none is free, it takes one that was
        prefetched and not used."""
        if not self.prefetch(key, transfer):
            unused = next((slot for slot in self.slots if not slot.live), None)
            if unused is None:
                raise AssertionError(f"{len(self.slots)} layer groups are live, and there are no more buffers")
            self._start(unused, key, transfer)
        slot = self._of(key)
        assert slot is not None, "just started"
        try:
            self.wait_for(slot.loading)
            self.wait_for(slot.saving)
        except BaseException:  # an interrupted wait leaves the buffer's content unknown as well
            slot.holds, slot.wanted = None, False
            raise
        slot.loading = slot.saving = None
        slot.live = True
        return slot.buffer.live

    def release(self, key: Hashable, *, changed: bool) -> None:
        """Release the staging buffer of a layer group that is not used any more; `changed` writes it back."""
        slot = self._of(key)
        assert slot, "a live layer group has a buffer"
        assert slot.transfer, "and came from a tier"
        slot.wanted = slot.live = False
        slot.mark = slot.transfer.mark()
        self.slots.remove(slot)
        self.slots.append(slot)
        if changed:
            slot.saving = self._saves[key] = slot.transfer.save(key, slot.buffer, slot.mark)

    def read(self, key: Hashable, transfer: Transfer, num_bytes: int) -> Tensor:
        """Read a staging buffer: the bytes of a layer group as they are now: a buffer's own on the device, else a copy
        on the host."""
        slot = self._of(key)
        if slot is not None:
            self.wait_for(slot.loading)
            return slot.buffer.live[:num_bytes]
        self.wait_for(self._saves.get(key))
        flat = torch.empty(num_bytes, dtype=torch.uint8)
        self.wait_for(transfer.read(key, flat))
        return flat

    def flush(self) -> None:
        """Wait until everything that was released from staging buffers is in its tier."""
        for slot in self.slots:
            self.wait_for(slot.saving)

    def wait_for(self, future: Future[None] | None) -> None:
        """Wait for a staging buffer until a transfer is done; its error is raised."""
        if future is None:
            return
        started = time.perf_counter()
        try:
            future.result()
        finally:
            self.wait_s += time.perf_counter() - started

    def _of(self, key: Hashable) -> StagingBuffer | None:
        return next((slot for slot in self.slots if slot.holds == key), None)

    def _start(self, slot: StagingBuffer, key: Hashable, transfer: Transfer) -> None:
        """Load a layer group into a staging buffer, unless it is there."""
        slot.wanted = True
        if slot.holds == key:
            return
        # Out of the buffer must be what was in it, and in its room what is to come, whichever tiers these are.
        before = [future for future in (slot.saving, self._saves.get(key)) if future is not None]
        if slot.transfer is not transfer and slot.loading is not None:
            wait(
                [slot.loading]
            )  # a layer group that was prefetched in vain; another thread than this tier's may be at it
        slot.holds, slot.transfer = key, transfer
        slot.loading = transfer.load(key, slot.buffer, slot.mark, before)

"""What a step changes, as it was before: so that a step that turns out bad half way can be taken back whole.

    journal.begin()
    journal.keep(part, tensors)       # just before the slice's first change
    journal.rollback(residence)       # or commit()

As many bytes as all slices that a step changes, parameters and states, on the host or on disk; room is taken when a
slice is kept for the first time, and used again in every step. Copies to the host are in order with the computation. A
disk is written by a thread from two buffers of the largest slice, so `keep` waits for it only where it is slower than
the computation. The bytes are of no use to another process: a checkpoint is. Called by `training.layer_major_step`.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tilewright.core.config import Tier
from tilewright.memory.layout import Layout
from tilewright.memory.on_device import Residence
from tilewright.memory.tiers import DiskStore, HostStore
from tilewright.models.layered import Slice


@dataclass(eq=False)
class _Room:
    """Where a slice is kept."""

    layout: Layout
    store: HostStore | DiskStore


@dataclass(eq=False)
class _Buffer:
    """Host memory in front of the disk, and what is written from it."""

    memory: HostStore
    writing: Future[None] | None = None


class Journal:
    """Keeps slices as they were before a step.

    Args:
        tier: host or disk.
        device: where the tensors are.
        folder: of the disk tier.
    """

    def __init__(
        self, tier: Literal["host", "disk"], device: torch.device | str, *, folder: Path | str | None = None
    ) -> None:
        if tier not in ("host", "disk") or (tier == "disk" and folder is None):
            raise ValueError(f"need host, or disk with a folder; got {tier=}, {folder=}")
        self.tier: Literal["host", "disk"] = tier
        self.device = torch.device(device)
        self._folder = folder
        self._rooms: dict[str, _Room] = {}
        self._kept: dict[str, tuple[Slice, Sequence[Tensor]]] = {}
        self._buffers: list[_Buffer] = []  # the one that was used longest ago first
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def begin(self) -> None:
        """A step begins: nothing is kept."""
        self._kept.clear()

    @torch.no_grad()
    def keep(self, part: Slice, tensors: Sequence[Tensor]) -> None:
        """Keep the values of a slice's live tensors; they may change when this returns.

        Raises:
            FitError: there is no room for them. The slice is unchanged.
            HardwareError: the disk fails, or failed since the last call.
        """
        if part.name in self._kept:
            raise AssertionError(f"{part.name} is kept already, and may have changed since")
        room = self._room(part.name, Layout.of(_numbered(tensors)))
        if isinstance(room.store, HostStore):
            _copy_out(tensors, room, room.store.view(0, room.layout.num_bytes))
        else:
            buffer = self._free_buffer(room.layout.num_bytes)
            flat = buffer.memory.view(0, room.layout.num_bytes)
            copied = _copy_out(tensors, room, flat)
            buffer.writing = self._writer.submit(_write, room.store, flat, copied)
        self._kept[part.name] = part, tensors

    @torch.no_grad()
    def rollback(self, residence: Residence) -> None:
        """Give all kept tensors the values that they had; nothing is kept afterwards.

        Raises:
            HardwareError: the disk fails.
        """
        self._settle()
        for name, (part, tensors) in self._kept.items():
            room = self._rooms[name]
            size = room.layout.num_bytes
            if isinstance(room.store, HostStore):
                if self.device.type == "cuda":
                    torch.cuda.current_stream(self.device).synchronize()
                flat = room.store.view(0, size)
            else:
                flat = self._free_buffer(size).memory.view(0, size)
                room.store.read(0, [flat])
            residence.fetch(part, states=True)
            for tensor, value in zip(tensors, room.layout.views(flat).values(), strict=True):
                tensor.copy_(value)
            residence.release(part, changed=True)
        self._kept.clear()

    def commit(self) -> None:
        """The step is good, and what was kept of no use any more."""
        self._kept.clear()

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """Bytes held by tier."""
        held: dict[Tier, int] = {
            "device": 0,
            "host": sum(buffer.memory.num_bytes for buffer in self._buffers),
            "disk": 0,
        }
        held[self.tier] += sum(room.store.num_bytes for room in self._rooms.values())
        return held

    def close(self) -> None:
        """Give all room back."""
        self._writer.shutdown()
        for store in [*(buffer.memory for buffer in self._buffers), *(room.store for room in self._rooms.values())]:
            store.close()
        self._buffers.clear()
        self._rooms.clear()
        self._kept.clear()

    def _room(self, name: str, layout: Layout) -> _Room:
        room = self._rooms.get(name)
        if room is not None and room.layout == layout:
            return room
        if room is not None:
            self._settle()
            room.store.close()
        if self.tier == "host":
            store: HostStore | DiskStore = HostStore(layout.num_bytes, self.device)
        else:
            assert self._folder is not None, "checked in the constructor"
            store = DiskStore(layout.num_bytes, Path(self._folder))
        self._rooms[name] = _Room(layout, store)
        return self._rooms[name]

    def _free_buffer(self, num_bytes: int) -> _Buffer:
        """A buffer of at least this size that nothing is written from any more."""
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer(HostStore(num_bytes, self.device)))
            return self._buffers[-1]
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        _wait(buffer)
        if buffer.memory.num_bytes < num_bytes:
            buffer.memory.close()
            buffer.memory = HostStore(num_bytes, self.device)
        return buffer

    def _settle(self) -> None:
        for buffer in self._buffers:
            _wait(buffer)


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(number): tensor for number, tensor in enumerate(tensors)}


def _copy_out(tensors: Sequence[Tensor], room: _Room, flat: Tensor) -> torch.cuda.Event | None:
    """Copy tensors into flat host memory; what says when it is done, where the device runs on its own."""
    for tensor, place in zip(tensors, room.layout.views(flat).values(), strict=True):
        place.copy_(tensor, non_blocking=True)
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    copied = torch.cuda.Event()
    copied.record()
    return copied


def _write(store: DiskStore, flat: Tensor, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    store.write(0, [flat])


def _wait(buffer: _Buffer) -> None:
    """Until a buffer is written; an error stays there, to be met by every later call."""
    if buffer.writing is not None:
        buffer.writing.result()
        buffer.writing = None

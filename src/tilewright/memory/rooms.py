"""Rooms in one tier off the device: each of a size of its own, taken and given back one by one.

    rooms = Rooms("disk", device, folder=folder)
    starts = rooms.take([size_a, size_b])       # all of them, or none
    rooms.write(starts[0], [bytes_a])
    rooms.give_back(starts[0])                  # to the system, not only to this object

A `tiers.Store` whose addresses are those that `take` gave. On the host each room is an allocation. On disk the rooms of
one `take` are in one file without a name, and one that is given back becomes a hole in it; a file system that makes no
holes has the room back with the last one of its file. Called by `arena`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.core.config import Tier
from tilewright.memory.tiers import DiskStore, HostStore, Store, make_store, no_host_memory


@dataclass(frozen=True)
class _Room:
    """Part of a store."""

    store: Store
    offset: int
    num_bytes: int


class Rooms:
    """Rooms by their addresses.

    Args:
        tier: host or disk.
        device: what the bytes travel to; memory for a GPU is page-locked.
        folder: of the disk tier.
    """

    def __init__(self, tier: Tier, device: torch.device, folder: Path | str | None = None) -> None:
        self.tier: Tier = tier
        self.in_memory = tier == "host"
        self._device, self._folder = device, folder
        self._rooms: dict[int, _Room] = {}
        self._next = 0

    def take(self, sizes: Sequence[int]) -> list[int]:
        """Room for so many bytes each; their addresses.

        Raises:
            FitError: they are not all there; none is taken then.
            ConfigError: the folder cannot be written.
        """
        rooms = self._on_host(sizes) if self.in_memory else self._on_disk(sizes)
        starts = []
        for room in rooms:
            starts.append(self._next)
            self._rooms[self._next] = room
            self._next += max(1, room.num_bytes)
        return starts

    def give_back(self, start: int) -> None:
        """Give a room back to the system. Nothing may be reading or writing it any more."""
        room = self._rooms.pop(start)
        if not any(other.store is room.store for other in self._rooms.values()):
            room.store.close()
        elif isinstance(room.store, DiskStore) and room.num_bytes:
            room.store.punch_hole(room.offset, room.num_bytes)

    def read(self, start: int, pieces: Sequence[Tensor]) -> None:
        """Copy a room's first bytes into `pieces`."""
        room = self._rooms[start]
        room.store.read(room.offset, pieces)

    def write(self, start: int, pieces: Sequence[Tensor]) -> None:
        """Copy `pieces` to a room's first bytes."""
        room = self._rooms[start]
        room.store.write(room.offset, pieces)

    def view(self, start: int, num_bytes: int) -> Tensor:
        """A room's first bytes themselves, on the host."""
        room = self._rooms[start]
        return room.store.view(room.offset, num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rooms."""
        return sum(room.num_bytes for room in self._rooms.values())

    def close(self) -> None:
        """Give all rooms back."""
        for room in self._rooms.values():
            room.store.close()
        self._rooms.clear()

    def _on_host(self, sizes: Sequence[int]) -> list[_Room]:
        """An allocation each. The system is asked for all of them at once before, for it refuses one that is larger
        than its memory, and not the last one of many."""
        try:
            torch.empty(sum(sizes), dtype=torch.uint8)
        except RuntimeError as error:  # torch's allocator has no class of its own for it
            raise no_host_memory(sum(sizes)) from error
        rooms: list[_Room] = []
        try:
            for size in sizes:
                rooms.append(_Room(HostStore(size, self._device), 0, size))
        except BaseException:
            for room in rooms:
                room.store.close()
            raise
        return rooms

    def _on_disk(self, sizes: Sequence[int]) -> list[_Room]:
        store = make_store(self.tier, sum(sizes), device=self._device, folder=self._folder)
        rooms, end = [], 0
        for size in sizes:
            rooms.append(_Room(store, end, size))
            end += size
        if not rooms:
            store.close()
        return rooms

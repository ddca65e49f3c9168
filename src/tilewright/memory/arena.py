"""The arena: tensors of a model, slice by slice, each in its tier; on the device only while they are used.

    arena = Arena("disk", device, folder=run_folder)
    for slice_id, tensors in slices.items():
        arena.add(slice_id, tensors)                # or in another tier than the arena's: tier="host"
    arena.seal()                                    # the tiers take the bytes over
    for slice_id in slices:
        arena.prefetch(next_one)
        tensors = arena.fetch(slice_id)             # live now
        ...
        arena.release(slice_id, changed=True)       # written back in the background
    arena.move(slice_id, "host")                    # between uses: to another tier

A tensor keeps its identity: while it is live, `tensor.data` is a view of a staging buffer; else it is one NaN (of an
integer: the largest) in its shape, which takes no memory, shows wherever it is used, and cannot be written to. On
tier `device` the tensors stay where they are and are always live. So do those of a slice that is added as `resident`:
for tensors that several slices read, as a head tied to the embedding. A tensor belongs to one slice.

`prefetch + 1` staging buffers of the largest slice that is off the device rotate, whatever its tier. A slice that is
released and wanted again before its buffer was needed costs nothing. What goes where is the caller's matter; the bytes
move in `transfer`, and lie in `rooms`.
Not for several threads. Called by the layer-major executor.
"""

import time
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tilewright.core.config import Tier
from tilewright.memory.layout import Layout, vacant
from tilewright.memory.rooms import Rooms
from tilewright.memory.transfer import Buffer, Traffic, Transfer, make_transfer
from tilewright.models.contract import FirstValues


@dataclass(eq=False)
class _Slice:
    tensors: dict[str, Tensor]
    fill: FirstValues | None
    tier: Tier
    fixed: bool = False
    """Never moves from the device."""
    away: dict[str, Tensor] = field(default_factory=dict)
    """What stands in for the tensors while they are not live."""
    layout: Layout = field(default_factory=lambda: Layout({}, 0))
    offset: int = 0
    """Address of its room, where it is not at home on the device."""
    saving: Future[None] | None = None
    """The last time that it was written back."""
    live: bool = False

    @property
    def resident(self) -> bool:
        """At home on the device."""
        return self.tier == "device"

    def enter(self, flat: Tensor) -> None:
        """Let the tensors be views of a staging buffer."""
        for name, view in self.layout.views(flat).items():
            self.tensors[name].data = view

    def leave(self) -> None:
        """Let the tensors be what stands in for them."""
        for name, value in self.away.items():
            self.tensors[name].data = value


@dataclass(eq=False)
class _Slot:
    """A staging buffer and what is in it."""

    buffer: Buffer
    holds: Hashable | None = None
    wanted: bool = False
    """Prefetched or live: not free for another slice."""
    loading: Future[None] | None = None
    saving: Future[None] | None = None
    mark: torch.cuda.Event | None = None

    def close(self) -> None:
        """Give memory back that is not the device's."""
        if self.buffer.bounce is not None:
            self.buffer.bounce.close()


class Arena:
    """Slices of tensors in tiers.

    Args:
        tier: where the bytes of a slice lie while they are not used, if it is added without a word about that.
        device: where the tensors are used.
        folder: of the disk tier.
        prefetch: slices that may be on their way, or written back, while one is used.
    """

    def __init__(
        self, tier: Tier, device: torch.device | str, *, folder: Path | str | None = None, prefetch: int = 1
    ) -> None:
        if tier not in ("device", "host", "disk") or prefetch < 0 or (tier == "disk" and folder is None):
            raise ValueError(f"need device, host or disk with a folder, and prefetch >= 0; got {tier=}, {prefetch=}")
        self.tier: Tier = tier
        self.device = torch.device(device)
        self._folder, self._num_slots = folder, prefetch + 1
        self._slices: dict[Hashable, _Slice] = {}
        self._owners: dict[int, Hashable] = {}
        self._slots: list[_Slot] = []  # the one that was used longest ago first
        self._rooms: dict[Tier, Rooms] = {}
        self._transfers: dict[Tier, Transfer] = {}
        self._wait_s = 0.0
        self._sealed = False

    # ---- filling ----

    def add(
        self,
        slice_id: Hashable,
        tensors: Mapping[str, Tensor],
        *,
        fill: FirstValues | None = None,
        tier: Tier | None = None,
        resident: bool = False,
    ) -> None:
        """Announce a slice. Nothing moves before `seal`.

        Args:
            slice_id: any name.
            tensors: contiguous ones on the device, by name; `vacant` ones where there is a `fill`.
            fill: makes the first values, called once, with host tensors under the same names, so that the values need
                not be anywhere before. None takes those that the tensors have.
            tier: its home; None for the arena's.
            resident: always on the device.
        """
        tier = "device" if resident else tier or self.tier
        if tier == "disk" and self._folder is None:
            raise ValueError(f"slice {slice_id!r} on disk needs an arena with a folder")
        if self._sealed or slice_id in self._slices:
            raise AssertionError(f"slice {slice_id!r} is added twice, or after seal()")
        for name, tensor in tensors.items():
            if tensor.is_meta or (fill is None and not tensor.is_contiguous()):
                raise AssertionError(f"slice {slice_id!r}, {name}: need contiguous tensors, or vacant ones and a fill")
            owner = self._owners.setdefault(id(tensor), slice_id)
            if owner != slice_id:
                raise AssertionError(f"{name} is in slices {owner!r} and {slice_id!r}: add it to one that is resident")
        self._slices[slice_id] = _Slice(dict(tensors), fill, tier, fixed=resident)

    def seal(self) -> None:
        """Take the tiers' room, then the bytes, slice by slice; afterwards nothing is live but what always is.

        Raises:
            FitError: a tier has not so much room; nothing has moved then.
            ConfigError: the folder cannot be written.
            HardwareError: the disk fails.
        """
        assert not self._sealed, "seal() once"
        self._sealed = True
        for tier in dict.fromkeys(item.tier for item in self._slices.values() if not item.resident):
            items = [item for item in self._slices.values() if item.tier == tier]
            for item in items:
                item.layout = Layout.of(item.tensors)
            starts = self._rooms_in(tier).take([item.layout.num_bytes for item in items])
            for item, start in zip(items, starts, strict=True):
                item.offset = start
        for item in self._slices.values():
            if item.resident:
                self._fill_on_device(item)
            else:
                self._take_over(item)
        self._make_slots()

    def _rooms_in(self, tier: Tier) -> Rooms:
        if tier not in self._rooms:
            self._rooms[tier] = Rooms(tier, self.device, self._folder)
            self._transfers[tier] = make_transfer(self._rooms[tier], self.device)
        return self._rooms[tier]

    def _make_slots(self) -> None:
        """Staging buffers for what is off the device now."""
        moving = [item for item in self._slices.values() if not item.resident]
        if moving:
            largest = max(item.layout.num_bytes for item in moving)
            # A buffer for a disk serves the host too, not the other way round.
            tier = max((item.tier for item in moving), key=("host", "disk").index)
            buffers = (self._transfers[tier].make_buffer(largest) for _ in range(min(self._num_slots, len(moving))))
            self._slots = [_Slot(buffer) for buffer in buffers]

    @torch.no_grad()
    def _take_over(self, item: _Slice) -> None:
        """Move the first values of a slice into the store, one copy and no more."""
        self._write_values(item, self._rooms[item.tier], item.offset)
        item.away = {name: vacant(t.shape, t.dtype, self.device) for name, t in item.tensors.items()}
        item.leave()

    def _write_values(self, item: _Slice, rooms: Rooms, start: int) -> None:
        """Fill a room with the first values of a slice, or with those that its tensors have."""
        size = item.layout.num_bytes
        flat = rooms.view(start, size) if rooms.in_memory else torch.empty(size, dtype=torch.uint8)
        views = item.layout.views(flat)
        fill, item.fill = item.fill, None
        if fill is not None:
            fill(views)
        else:
            for name, tensor in item.tensors.items():
                views[name].copy_(tensor)
        if not rooms.in_memory:
            rooms.write(start, [flat])

    @torch.no_grad()
    def _fill_on_device(self, item: _Slice) -> None:
        fill, item.fill = item.fill, None
        if fill is None:
            return
        values = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in item.tensors.items()}
        fill(values)
        for name, tensor in item.tensors.items():
            tensor.data = values.pop(name).to(self.device)

    # ---- using ----

    @property
    def slices(self) -> tuple[Hashable, ...]:
        """All slices in the order in which they were added."""
        return tuple(self._slices)

    def prefetch(self, slice_id: Hashable) -> bool:
        """Start bringing a slice in. False where no buffer is free for it: the slice comes when it is fetched."""
        item = self._slices[slice_id]
        if item.resident or item.live:
            return True
        if not self._slots:
            self._make_slots()
        slot = self._slot_of(slice_id) or self._free_slot()
        if slot is None:
            return False
        self._start(slot, slice_id, item)
        return True

    def fetch(self, slice_id: Hashable) -> dict[str, Tensor]:
        """Make a slice's tensors live, waiting for them where need be; the tensors by name.

        Raises:
            HardwareError: the disk fails, now or when an earlier slice was written back.
        """
        item = self._slices[slice_id]
        if item.live:
            raise AssertionError(f"slice {slice_id!r} is live already: release it first")
        if not item.resident:
            if not self._slots:
                self._make_slots()
            slot = self._slot_of(slice_id) or self._free_slot() or self._least_wanted_slot()
            if slot is None:
                raise AssertionError(f"{len(self._slots)} slices are live, and there are no more buffers")
            self._start(slot, slice_id, item)
            self._wait(slot)
            item.enter(slot.buffer.live)
        item.live = True
        return dict(item.tensors)

    def release(self, slice_id: Hashable, *, changed: bool) -> None:
        """Let a slice go; `changed` writes it back in the background."""
        item = self._slices[slice_id]
        if not item.live:
            raise AssertionError(f"slice {slice_id!r} is not live")
        item.live = False
        if item.resident:
            return
        item.leave()
        slot = self._slot_of(slice_id)
        assert slot is not None, "a live slice has a buffer"
        slot.wanted, slot.mark = False, self._transfers[item.tier].mark()
        self._slots.remove(slot)
        self._slots.append(slot)
        if changed:
            transfer = self._transfers[item.tier]
            slot.saving = transfer.save(item.offset, item.layout.num_bytes, slot.buffer, slot.mark)
            item.saving = slot.saving

    @contextmanager
    def using(self, slice_id: Hashable, *, changed: bool) -> Iterator[dict[str, Tensor]]:
        """`fetch`, and `release` at the end of the block, however it ends."""
        tensors = self.fetch(slice_id)
        try:
            yield tensors
        finally:
            self.release(slice_id, changed=changed)

    def read(self, slice_id: Hashable) -> dict[str, Tensor]:
        """Copies of a slice's tensors in host memory, as they are now. What is live stays so, what is not does not
        become it."""
        item = self._slices[slice_id]
        if item.resident or item.live:
            return {name: _host_copy(tensor) for name, tensor in item.tensors.items()}
        slot = self._slot_of(slice_id)
        if slot is not None:
            self._wait_for(slot.loading)
            return {name: _host_copy(view) for name, view in item.layout.views(slot.buffer.live).items()}
        return item.layout.views(self._read(item))

    def _read(self, item: _Slice) -> Tensor:
        """The bytes of a slice that no buffer holds, on the host."""
        self._wait_for(item.saving)
        flat = torch.empty(item.layout.num_bytes, dtype=torch.uint8)
        self._wait_for(self._transfers[item.tier].read(item.offset, flat))
        return flat

    def flush(self) -> None:
        """Wait until everything that was released is in its tier.

        Raises:
            HardwareError: it cannot be written.
        """
        for slot in self._slots:
            self._wait_for(slot.saving)

    def close(self) -> None:
        """Wait for what is on its way, and give the tier's room back. What is not live is lost."""
        for transfer in self._transfers.values():
            transfer.close()
        for slot in self._slots:
            slot.close()
        for rooms in self._rooms.values():
            rooms.close()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """Bytes held by tier: on the device what always stays there and the staging buffers."""
        fixed = [item for item in self._slices.values() if item.resident]
        held: dict[Tier, int] = {"device": sum(t.nbytes for item in fixed for t in item.tensors.values())}
        held |= {"host": 0, "disk": 0}
        for tier, rooms in self._rooms.items():
            held[tier] += rooms.num_bytes
        for slot in self._slots:
            held["device"] += slot.buffer.live.numel()
            held["host"] += slot.buffer.bounce.num_bytes if slot.buffer.bounce is not None else 0
        return held

    @property
    def traffic(self) -> Traffic:
        """What went to and from the tiers since the arena was sealed, and the seconds spent waiting for them."""
        parts = [transfer.traffic for transfer in self._transfers.values()]
        read, written = sum(part.read_bytes for part in parts), sum(part.written_bytes for part in parts)
        return Traffic(read, written, self._wait_s)

    # ---- moving ----

    def tier_of(self, slice_id: Hashable) -> Tier:
        """Where a slice is at home."""
        return self._slices[slice_id].tier

    @property
    def travels(self) -> bool:
        """Whether any slice is at home off the device."""
        return any(not item.resident for item in self._slices.values())

    @torch.no_grad()
    def move(self, slice_id: Hashable, tier: Tier) -> None:
        """Give a slice another home. It is in memory twice while it moves, nothing else is.

        Args:
            slice_id: not live.
            tier: device, host, or disk where the arena has a folder.

        Raises:
            FitError: the tier has not so much room; the slice stays where it is.
            HardwareError: the disk fails, now or when an earlier slice was written back.
            RuntimeError: the device has not so much memory; the slice stays where it is.
        """
        item = self._slices[slice_id]
        if tier == item.tier:
            return
        if not self._sealed or item.fixed or (tier == "disk" and self._folder is None):
            raise AssertionError(f"slice {slice_id!r} cannot move to {tier}: not sealed, fixed, or without a folder")
        if item.live or any(slot.holds is not None and self._slices[slot.holds].live for slot in self._slots):
            raise AssertionError("slices move while none is live")
        self._drop_slots()
        before, start = item.tier, item.offset
        if tier == "device":
            self._bring_home(item)
        else:
            self._send_off(item, tier)
        if before != "device":
            self._rooms[before].give_back(start)

    def _bring_home(self, item: _Slice) -> None:
        views = item.layout.views(self._read(item))
        values = {name: view.to(self.device, copy=True) for name, view in views.items()}
        for name, value in values.items():
            item.tensors[name].data = value
        item.tier, item.away = "device", {}

    def _send_off(self, item: _Slice, tier: Tier) -> None:
        rooms, item.layout = self._rooms_in(tier), Layout.of(item.tensors)
        (start,) = rooms.take([item.layout.num_bytes])
        try:
            if item.resident:
                self._write_values(item, rooms, start)
            else:
                rooms.write(start, [self._read(item)])
        except BaseException:
            rooms.give_back(start)
            raise
        item.tier, item.offset = tier, start
        if not item.away:
            item.away = {name: vacant(t.shape, t.dtype, self.device) for name, t in item.tensors.items()}
            item.leave()

    def _drop_slots(self) -> None:
        """Wait for what is on its way, and give the staging buffers back: they are made again when they are needed."""
        for slot in self._slots:
            self._wait_for(slot.loading)
            self._wait_for(slot.saving)
            slot.close()
        self._slots = []

    # ---- buffers ----

    def _slot_of(self, slice_id: Hashable) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds == slice_id), None)

    def _free_slot(self) -> _Slot | None:
        return next((slot for slot in self._slots if not slot.wanted), None)

    def _least_wanted_slot(self) -> _Slot | None:
        """A buffer whose slice was prefetched and never came to use."""
        return next((slot for slot in self._slots if not self._slices[slot.holds].live), None)

    def _start(self, slot: _Slot, slice_id: Hashable, item: _Slice) -> None:
        """Load a slice into a buffer, unless it is there."""
        slot.wanted = True
        if slot.holds == slice_id:
            return
        # Out of the buffer must be what was in it, and in its room what is to come, whichever tiers these are.
        before = [future for future in (slot.saving, item.saving) if future is not None]
        if slot.holds is not None and self._slices[slot.holds].tier != item.tier and slot.loading is not None:
            wait([slot.loading])  # a slice that was prefetched in vain; another thread than this tier's may be at it
        slot.holds = slice_id
        transfer = self._transfers[item.tier]
        slot.loading = transfer.load(item.offset, item.layout.num_bytes, slot.buffer, slot.mark, before)

    def _wait(self, slot: _Slot) -> None:
        """Until the slice in a buffer may be used and changed."""
        try:
            self._wait_for(slot.loading)
            self._wait_for(slot.saving)
        except BaseException:  # an interrupted wait leaves the buffer's content unknown as well
            slot.holds, slot.wanted = None, False
            raise
        slot.loading = slot.saving = None

    def _wait_for(self, future: Future[None] | None) -> None:
        if future is None:
            return
        started = time.perf_counter()
        try:
            future.result()
        finally:
            self._wait_s += time.perf_counter() - started


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)

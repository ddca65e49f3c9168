"""The pool: tensors of a model, layer group by layer group, each in its tier; on the device only while they are used.

    pool = OffloadPool("disk", device, folder=run_folder)
    for slice_id, tensors in layer_groups.items():
        pool.add(slice_id, tensors)  # or in another tier than the pool's: tier="host"
    pool.seal()  # the tiers take the bytes over
    for slice_id in layer groups:
        pool.prefetch(next_one)
        tensors = pool.fetch(slice_id)  # live now
        ...
        pool.release(slice_id, changed=True)  # written back in the background
    pool.move(slice_id, "host")  # between uses: to another tier

A tensor keeps its identity: while it is live, `tensor.data` is a view of a staging buffer; else it is one NaN (of an
integer: the largest) in its shape, which takes no memory, shows wherever it is used, and cannot be written to. On tier
`device` the tensors stay where they are and are always live. So do those of a layer group that is added as `resident`:
for tensors that several layer groups read, as a head tied to the embedding. A tensor belongs to one layer group.

`prefetch + 1` staging buffers of the largest layer group that is off the device rotate, whatever its tier
(`staging_slots`). Which layer group goes where is the caller's choice; the bytes move in `transfer`, and are in
`byte_stores`. Not for several threads."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tilewright.core.config.recipe import Tier
from tilewright.memory.offload.byte_stores import Store, make_store
from tilewright.memory.offload.flat_layout import Layout, placeholder
from tilewright.memory.offload.staging_slots import StagingBuffers
from tilewright.memory.offload.transfer import Traffic, Transfer, make_transfer

Fill = Callable[[dict[str, Tensor]], None]
"""Writes the initial values of tensors on the host, by name."""


@dataclass(eq=False)
class _Slice:
    tensors: dict[str, Tensor]
    fill: Fill | None
    tier: Tier
    fixed: bool = False
    """Never moves from the device."""
    away: dict[str, Tensor] = field(default_factory=dict)
    """Placeholders of the tensors while they are not live."""
    layout: Layout = field(default_factory=lambda: Layout({}, 0))
    live: bool = False

    @property
    def resident(self) -> bool:
        """True where a group of the pool is resident: its tensors are stored on the device."""
        return self.tier == "device"

    def enter(self, flat: Tensor) -> None:
        """Make the tensors of one of the pool's layer groups views of a staging buffer."""
        for name, view in self.layout.views(flat).items():
            self.tensors[name].data = view

    def to_placeholders(self, device: torch.device) -> None:
        """Make placeholders in the pool: what is in for the tensors while their bytes are in a tier."""
        self.away = {name: placeholder(tensor.shape, tensor.dtype, device) for name, tensor in self.tensors.items()}
        self.leave()

    def leave(self) -> None:
        """Make the tensors of a layer group placeholders."""
        for name, value in self.away.items():
            self.tensors[name].data = value


class OffloadPool:
    """Pool of layer groups of tensors, each stored in its tier.

    Args:
        tier: where the bytes of a layer group lie while they are not used, if it is added without a tier.
        device: where the tensors are used.
        folder: of the disk tier.
        prefetch: layer groups that may be on their way, or written back, while one is used.
    """

    def __init__(
        self, tier: Tier, device: torch.device | str, *, folder: Path | str | None = None, prefetch: int = 1
    ) -> None:
        if tier not in ("device", "host", "disk") or prefetch < 0 or (tier == "disk" and folder is None):
            raise ValueError(f"need device, host or disk with a folder, and prefetch >= 0; got {tier=}, {prefetch=}")
        self.tier: Tier = tier
        self.device = torch.device(device)
        self._folder, self._num_slots = folder, prefetch + 1
        self._layer_groups: dict[Hashable, _Slice] = {}
        self._owners: dict[int, Hashable] = {}
        self._slots = StagingBuffers()
        self._transfers: dict[Tier, Transfer] = {}
        self._sealed = False

    # ---- filling ----

    def add(
        self,
        slice_id: Hashable,
        tensors: Mapping[str, Tensor],
        *,
        fill: Fill | None = None,
        tier: Tier | None = None,
        resident: bool = False,
    ) -> None:
        """Add a layer group to the pool. Nothing moves before `seal`.

        Args:
            slice_id: any name.
            tensors: contiguous ones on the device, by name; `placeholder` ones where there is a `fill`.
            fill: makes the initial values, called once, with host tensors under the same names, so that the values need
                not be anywhere before. None takes those that the tensors have.
            tier: its home; None for the pool's.
            resident: always on the device.
        """
        tier = "device" if resident else tier or self.tier
        if tier == "disk" and self._folder is None:
            raise ValueError(f"layer group {slice_id!r} on disk needs an pool with a folder")
        if self._sealed or slice_id in self._layer_groups:
            raise AssertionError(f"layer group {slice_id!r} is added twice, or after seal()")
        for name, tensor in tensors.items():
            if tensor.is_meta or (fill is None and not tensor.is_contiguous()):
                raise AssertionError(
                    f"layer group {slice_id!r}, {name}: need contiguous tensors, or vacant ones and a fill"
                )
            owner = self._owners.setdefault(id(tensor), slice_id)
            if owner != slice_id:
                raise AssertionError(
                    f"{name} is in layer groups {owner!r} and {slice_id!r}: add it to one that is resident"
                )
        self._layer_groups[slice_id] = _Slice(dict(tensors), fill, tier, fixed=resident)

    def seal(self) -> None:
        """Seal the pool: reserve the tiers' memory, then move the bytes into it, layer group by layer group. Afterwards
        nothing is live but what always is.

        Raises:
            FitError: a tier has not so much room; nothing has moved then.
            ConfigError: the folder cannot be written.
            HardwareError: the disk fails.
        """
        assert not self._sealed, "seal() once"
        self._sealed = True
        tiers: dict[Tier, None] = {item.tier: None for item in self._layer_groups.values() if not item.resident}
        for tier in tiers:
            items = {slice_id: item for slice_id, item in self._layer_groups.items() if item.tier == tier}
            for item in items.values():
                item.layout = Layout.of(item.tensors)
            self._to(tier).store.take({slice_id: item.layout.num_bytes for slice_id, item in items.items()})
        for slice_id, item in self._layer_groups.items():
            if item.resident:
                self._fill_on_device(item)
            else:
                self._write_values(slice_id, item, self._to(item.tier).store)
                item.to_placeholders(self.device)
        self._make_slots()

    def _to(self, tier: Tier) -> Transfer:
        """The pool's mover of bytes to and from a tier."""
        if tier not in self._transfers:
            self._transfers[tier] = make_transfer(make_store(tier, self.device, self._folder), self.device)
        return self._transfers[tier]

    def _make_slots(self) -> None:
        """Make the pool's staging buffers for what is off the device now."""
        moving = [item for item in self._layer_groups.values() if not item.resident]
        if moving:
            largest = max(item.layout.num_bytes for item in moving)
            # A buffer for a disk serves the host too, not the other way round.
            tier: Tier = "disk" if any(item.tier == "disk" for item in moving) else "host"
            self._slots.make(self._to(tier), largest, min(self._num_slots, len(moving)))

    @torch.no_grad()
    def _write_values(self, slice_id: Hashable, item: _Slice, store: Store) -> None:
        """Write values into the pool: fill a room with the initial ones of a layer group, or with those that its
        tensors have: one copy and no more."""
        flat = store.view(slice_id) if store.in_memory else torch.empty(item.layout.num_bytes, dtype=torch.uint8)
        views = item.layout.views(flat)
        fill, item.fill = item.fill, None
        if fill is not None:
            fill(views)
        else:
            for name, tensor in item.tensors.items():
                views[name].copy_(tensor)
        if not store.in_memory:
            store.write(slice_id, [flat])

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

    def prefetch(self, slice_id: Hashable) -> bool:
        """Start bringing a layer group of the pool to the device. False if no buffer is free for it: it then comes when
        it is fetched."""
        item = self._layer_groups[slice_id]
        if item.resident or item.live:
            return True
        if not self._slots.slots:
            self._make_slots()
        return self._slots.prefetch(slice_id, self._to(item.tier))

    def fetch(self, slice_id: Hashable) -> dict[str, Tensor]:
        """Make the tensors of one of the pool's layer groups live, waiting for them if need be; returns the tensors by
        name.

        Raises:
            HardwareError: the disk fails, now or when an earlier layer group was written back.
        """
        item = self._layer_groups[slice_id]
        if item.live:
            raise AssertionError(f"layer group {slice_id!r} is live already: release it first")
        if not item.resident:
            if not self._slots.slots:
                self._make_slots()
            item.enter(self._slots.fetch(slice_id, self._to(item.tier)))
        item.live = True
        return dict(item.tensors)

    def release(self, slice_id: Hashable, *, changed: bool) -> None:
        """Release a layer group of the pool; `changed` writes it back in the background."""
        item = self._layer_groups[slice_id]
        if not item.live:
            raise AssertionError(f"layer group {slice_id!r} is not live")
        item.live = False
        if not item.resident:
            item.leave()
            self._slots.release(slice_id, changed=changed)

    @contextmanager
    def using(self, slice_id: Hashable, *, changed: bool) -> Iterator[dict[str, Tensor]]:
        """Use a layer group of the pool: `fetch`, and `release` at the end of the block, however it ends."""
        tensors = self.fetch(slice_id)
        try:
            yield tensors
        finally:
            self.release(slice_id, changed=changed)

    def read(self, slice_id: Hashable) -> dict[str, Tensor]:
        """Read from the pool: copies of a layer group's tensors in host memory, as they are now. What is live stays so,
        what is not does not become it."""
        item = self._layer_groups[slice_id]
        if item.resident or item.live:
            return {name: _host_copy(tensor) for name, tensor in item.tensors.items()}
        return {name: _host_copy(view) for name, view in self._views(slice_id, item).items()}

    def _views(self, slice_id: Hashable, item: _Slice) -> dict[str, Tensor]:
        """The tensors of a layer group that is off the device and not live, as the tier holds them."""
        return item.layout.views(self._slots.read(slice_id, self._to(item.tier), item.layout.num_bytes))

    def flush(self) -> None:
        """Wait until everything that the pool has released is in its tier.

        Raises:
            HardwareError: it cannot be written.
        """
        self._slots.flush()

    def close(self) -> None:
        """Close the pool: wait for what is on its way, and free the tier's room. What is not live is lost."""
        for transfer in self._transfers.values():
            transfer.close()
        self._slots.close()
        for transfer in self._transfers.values():
            transfer.store.close()

    def __enter__(self) -> "OffloadPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """The pool's bytes by tier: on the device the tensors that always stay there, and the staging buffers."""
        fixed = [item for item in self._layer_groups.values() if item.resident]
        held: dict[Tier, int] = {"device": sum(t.nbytes for item in fixed for t in item.tensors.values())}
        held |= {"host": 0, "disk": 0}
        for tier, transfer in self._transfers.items():
            held[tier] += transfer.store.num_bytes
        for slot in self._slots.slots:
            held["device"] += slot.buffer.live.nbytes
            held["host"] += slot.buffer.bounce.nbytes if slot.buffer.bounce is not None else 0
        return held

    @property
    def traffic(self) -> Traffic:
        """The pool's traffic since it was sealed: bytes to and from the tiers, and the seconds spent waiting for
        them."""
        parts = [transfer.traffic for transfer in self._transfers.values()]
        read, written = sum(part.read_bytes for part in parts), sum(part.written_bytes for part in parts)
        return Traffic(read, written, self._slots.wait_s)

    # ---- moving ----

    def tier_of(self, slice_id: Hashable) -> Tier:
        """The tier in which the pool stores a layer group."""
        return self._layer_groups[slice_id].tier

    @property
    def is_offloaded(self) -> bool:
        """True where the pool stores any layer group off the device."""
        return any(not item.resident for item in self._layer_groups.values())

    @torch.no_grad()
    def move(self, slice_id: Hashable, tier: Tier) -> None:
        """Move a layer group of the pool to another home. It is in memory twice while it moves, nothing else is.

        Args:
            slice_id: not live.
            tier: device, host, or disk where the pool has a folder.

        Raises:
            FitError: the tier has not so much room; the layer group stays where it is.
            HardwareError: the disk fails, now or when an earlier layer group was written back.
            RuntimeError: the device has not so much memory; the layer group stays where it is.
        """
        item = self._layer_groups[slice_id]
        if tier == item.tier:
            return
        if not self._sealed or item.fixed or (tier == "disk" and self._folder is None):
            raise AssertionError(
                f"layer group {slice_id!r} cannot move to {tier}: not sealed, fixed, or without a folder"
            )
        if item.live or any(slot.live for slot in self._slots.slots):
            raise AssertionError("layer groups move while none is live")
        self._slots.drop()
        before = item.tier
        if tier == "device":
            self._bring_home(slice_id, item)
        else:
            self._send_off(slice_id, item, tier)
        if before != "device":
            self._to(before).store.give_back([slice_id])

    def _bring_home(self, slice_id: Hashable, item: _Slice) -> None:
        views = self._views(slice_id, item)
        values = {name: view.to(self.device, copy=True) for name, view in views.items()}
        for name, value in values.items():
            item.tensors[name].data = value
        item.tier, item.away = "device", {}

    def _send_off(self, slice_id: Hashable, item: _Slice, tier: Tier) -> None:
        store, item.layout = self._to(tier).store, Layout.of(item.tensors)
        store.take({slice_id: item.layout.num_bytes})
        try:
            if item.resident:
                self._write_values(slice_id, item, store)
            else:
                store.write(slice_id, [self._slots.read(slice_id, self._to(item.tier), item.layout.num_bytes)])
        except BaseException:
            store.give_back([slice_id])
            raise
        item.tier = tier
        if not item.away:
            item.to_placeholders(self.device)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)

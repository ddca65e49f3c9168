"""Copies of all that a step changes, made before: so that a step that turns out bad half way can be taken back whole.

    rollback.begin()
    rollback.keep(part, tensors)  # just before the layer group's first change
    rollback.rollback(residence)  # or commit()

As many bytes as all layer groups that a step changes, parameters and states, on the host or on disk; room is taken when
a layer group is kept for the first time, and used again in every step. Copies to the host are in order with the
computation. A disk is written by a thread from two buffers of the largest layer group, so `keep` waits for it only
where it is slower than the computation. The bytes are of no use to another process: a checkpoint is."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tilewright.core.config.recipe import Tier
from tilewright.memory.offload.byte_stores import Store, make_store
from tilewright.memory.offload.flat_layout import Layout
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.memory.offload.pinned_memory import pinned_empty, unpin
from tilewright.models.layerwise.layer_view import LayerGroup


@dataclass(eq=False)
class _Kept:
    part: LayerGroup
    tensors: Sequence[Tensor]
    layout: Layout


@dataclass(eq=False)
class _Buffer:
    """Host memory in front of the disk, and what is written from it."""

    memory: Tensor
    writing: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the rollback buffer's memory is written; an error stays, and every later call raises it."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None


class RollbackBuffer:
    """Keeps layer groups as they were before a step.

    Args:
        tier: host or disk.
        device: where the tensors are.
        folder: of the disk tier.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self, tier: Literal["host", "disk"], device: torch.device | str, *, folder: Path | str | None = None
    ) -> None:
        if tier not in ("host", "disk") or (tier == "disk" and folder is None):
            raise ValueError(f"need host, or disk with a folder; got {tier=}, {folder=}")
        self.tier: Literal["host", "disk"] = tier
        self.device = torch.device(device)
        self._store: Store = make_store(tier, self.device, folder)
        self._kept: dict[str, _Kept] = {}
        self._buffers: list[_Buffer] = []  # the one that was used longest ago first
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")

    def begin(self) -> None:
        """Begin a step with nothing kept for its rollback."""
        self._kept.clear()

    @torch.no_grad()
    def save(self, part: LayerGroup, tensors: Sequence[Tensor]) -> None:
        """Save for a rollback: keep the values of a layer group's live tensors; they may change when this returns.

        Raises:
            FitError: there is no room for them. The layer group is unchanged.
            HardwareError: the disk fails, or failed since the last call.
        """
        if part.name in self._kept:
            raise AssertionError(f"{part.name} is kept already, and may have changed since")
        layout = Layout.of({str(number): tensor for number, tensor in enumerate(tensors)})
        self._store.fit(part.name, layout.num_bytes, self._settle)
        if self._store.in_memory:
            _copy_out(tensors, layout, self._store.view(part.name))
        else:
            buffer = self._free_buffer(layout.num_bytes)
            flat = buffer.memory[: layout.num_bytes]
            copied = _copy_out(tensors, layout, flat)
            buffer.writing = self._writer.submit(_write, self._store, part.name, flat, copied)
        self._kept[part.name] = _Kept(part, tensors, layout)

    @torch.no_grad()
    def rollback(self, offloader: ParamOffloader) -> None:
        """Roll a step back: restore the values of all kept tensors. Nothing is kept afterwards.

        Raises:
            HardwareError: the disk fails.
        """
        self._settle()
        for name, kept in self._kept.items():
            if self._store.in_memory:
                flat = self._store.view(name)
            else:
                flat = self._free_buffer(kept.layout.num_bytes).memory[: kept.layout.num_bytes]
                self._store.read(name, [flat])
            offloader.fetch(kept.part, states=True)
            for tensor, value in zip(kept.tensors, kept.layout.views(flat).values(), strict=True):
                tensor.copy_(value)
            offloader.release(kept.part, changed=True)
        self._kept.clear()

    def commit(self) -> None:
        """Drop the rollback's copies after a good step."""
        self._kept.clear()

    @property
    def num_bytes(self) -> dict[Tier, int]:
        """Bytes of kept copies for a rollback, by tier."""
        held: dict[Tier, int] = {"device": 0, "host": sum(len(buffer.memory) for buffer in self._buffers), "disk": 0}
        held[self.tier] += self._store.num_bytes
        return held

    def close(self) -> None:
        """Close the rollback buffer: free all room of its copies."""
        self._writer.shutdown()
        for buffer in self._buffers:
            unpin(buffer.memory, self.device)
        self._store.close()
        self._buffers.clear()
        self._kept.clear()

    def _free_buffer(self, num_bytes: int) -> _Buffer:
        """A free buffer for the rollback of at least this size that nothing is written from any more."""
        if len(self._buffers) < 2:
            self._buffers.append(_Buffer(pinned_empty(num_bytes, self.device)))
            return self._buffers[-1]
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.wait()
        if len(buffer.memory) < num_bytes:
            unpin(buffer.memory, self.device)
            buffer.memory = pinned_empty(num_bytes, self.device)
        return buffer

    def _settle(self) -> None:
        """Wait until the store has all that was copied out of the rollback buffer."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for buffer in self._buffers:
            buffer.wait()


def _copy_out(tensors: Sequence[Tensor], layout: Layout, flat: Tensor) -> torch.cuda.Event | None:
    """Copy tensors out for a rollback into flat host memory; what says when it is done, where the device runs on its
    own."""
    for tensor, place in zip(tensors, layout.views(flat).values(), strict=True):
        place.copy_(tensor, non_blocking=True)
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    copied = torch.cuda.Event()
    copied.record()
    return copied


def _write(store: Store, key: str, flat: Tensor, copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    store.write(key, [flat])

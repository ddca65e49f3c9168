"""How fast a tier is: bytes per second to and from the device, measured with the code that training uses.

A disk is measured past the system's copies of it in memory, as a tier larger than memory meets it; `cached` is what a
smaller one meets.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.core.config.recipe import Tier
from tilewright.memory.offload.byte_stores import DiskStore, make_store
from tilewright.memory.offload.transfer import make_transfer


@dataclass(frozen=True)
class LinkRates:
    """Rates of a tier in bytes a second."""

    read: float
    write: float
    cached_read: float | None = None
    """Of a disk: from the system's memory."""
    cached_write: float | None = None
    """Of a disk: into the system's memory."""


def measure_link(
    tier: Tier, device: torch.device | str, *, folder: Path | str | None = None, slice_bytes: int, num_slices: int = 4
) -> LinkRates:
    """Measure bandwidth, how fast a tier is: write and read `num_slices` layer groups one after another.

    Args:
        tier: host or disk.
        device: the other end.
        folder: of the disk tier.
        slice_bytes: bytes moved at a time.
        num_slices: room taken in the tier, in layer groups.

    Raises:
        FitError: the tier has not so much room.
        ConfigError: the folder cannot be written.
        HardwareError: the disk fails.
    """
    device = torch.device(device)
    store = make_store(tier, device, folder)
    store.take(dict.fromkeys(range(num_slices), slice_bytes))
    transfer = make_transfer(store, device)
    buffer = transfer.make_buffer(slice_bytes)
    buffer.live.zero_()

    def rate(move: Callable[[int], Future[None]], afterwards: Callable[[], None] = lambda: None) -> float:
        started = time.perf_counter()
        for key in range(num_slices):
            move(key).result()
        afterwards()
        return slice_bytes * num_slices / (time.perf_counter() - started)

    def write(key: int) -> Future[None]:
        return transfer.save(key, buffer, transfer.mark())

    def read(key: int) -> Future[None]:
        return transfer.load(key, buffer, transfer.mark(), ())

    try:
        rate(write)  # touches all pages once
        if not isinstance(store, DiskStore):
            return LinkRates(rate(read), rate(write))
        cached_write, cached_read = rate(write), rate(read)
        written = rate(write, store.sync)
        store.forget_cached()
        return LinkRates(rate(read), written, cached_read, cached_write)
    finally:
        transfer.close()
        buffer.close()
        store.close()

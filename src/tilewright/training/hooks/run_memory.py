"""Memory of the device as a run has it: what it may use, what its steps took; of several ranks that of the worst."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch

from tilewright.core.memory_plan import MemoryPlan
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.training.executor.base import Executor
from tilewright.training.hooks.agreement import Agreement

LOOK_S = 1.0
"""Seconds between two looks at the machine's free memory."""


@dataclass(frozen=True)
class RunMemory:
    """The device's memory as a tracker measures it; of several ranks that of the worst, so that all decide the same.

    Args:
        memory_tracker: of this rank.
        free: bytes that this rank may use now.
        reserve: bytes that this process holds of the device outside of its allocator.
        agreement: of the run.
    """

    memory_tracker: MemoryTracker
    free: Callable[[], float]
    reserve: int
    agreement: Agreement

    def allowed(self) -> float:
        """Bytes that the run may use on the device now."""
        return self.agreement.least(self.free())

    def peaks(self) -> Mapping[str, int]:
        """Peak bytes by phase since it was asked last."""
        own = self.memory_tracker.take_peaks()
        return self.agreement.worst({name: size + self.reserve for name, size in own.items()})

    def apply(self, executor: Executor, memory_plan: MemoryPlan) -> None:
        """See `Agreement.apply`."""
        self.agreement.apply(executor, memory_plan)

    def slowest(self, seconds: float) -> float:
        """Seconds of the slowest rank."""
        return self.agreement.most(seconds)


class MemoryWatch:
    """Bytes that this process may use on its device now: its limit, or what it holds and what is free, if that is less.

    Args:
        limit: of the run.
        device: where it trains. On `cpu` the host's memory.
        reserve: bytes that this process holds of the device outside of its allocator.
        clock: seconds; the machine is asked once a second at most.
        ranks: processes of the run on this machine, which share what is free of the host.
    """

    def __init__(
        self,
        limit: int,
        device: torch.device,
        reserve: int = 0,
        clock: Callable[[], float] = time.monotonic,
        ranks: int = 1,
    ) -> None:
        self.limit = limit
        self._device = device
        self._reserve = reserve
        self._clock = clock
        self._ranks = ranks
        self._looked = -LOOK_S
        self._there = 0

    def __call__(self) -> float:
        """Asked before each step."""
        if (now := self._clock()) - self._looked >= LOOK_S:
            self._looked, self._there = now, there_bytes(self._device, self._ranks) + self._reserve
        return float(min(self.limit, self._there))


def there_bytes(device: torch.device, ranks: int = 1) -> int:
    """What is free on a device (of a host's memory the share of one of so many ranks), and what this process holds."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available // ranks + psutil.Process().memory_info().rss

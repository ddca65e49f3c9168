"""Load of the machine now: CPU, power, memory, disk, and GPUs where NVIDIA's library is installed.

Measured when asked, by no thread of its own: a page that is closed costs nothing.
"""

import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tilewright.energy.counter import Tally
from tilewright.energy.nvml import Nvml
from tilewright.energy.processors import processor_counters

_KEPT_S = 0.5
"""Two pages that ask within this time get the same numbers; shares over a shorter time mean little."""


class SystemLoad:
    """Load of the machine, asked of the operating system at most once per half second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gpus = Nvml.open()
        self._sampled_s = -_KEPT_S
        self._sample: dict[str, Any] = {}
        psutil.cpu_percent()  # shares are since the call before, and the first means nothing
        self._disk = self._disk_bytes()
        found = processor_counters()
        self._energy, self._no_energy = [Tally(counter) for counter in found.counters], "; ".join(found.reasons)
        for tally in self._energy:
            tally.begin(time.monotonic())

    def sample(self, folder: Path) -> dict[str, Any]:
        """Measure the machine's load: shares in percent, sizes in bytes, bytes per second; None where it is not known.

        Args:
            folder: whose disk is meant.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._sampled_s >= _KEPT_S:
                self._sample = self._measure(folder, now - self._sampled_s)
                self._sampled_s = now
            return self._sample

    def _measure(self, folder: Path, seconds: float) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        before, self._disk = self._disk, self._disk_bytes()
        rates = [None, None]
        if before is not None and self._disk is not None:
            rates = [max(new - old, 0) / seconds for new, old in zip(self._disk, before, strict=True)]
        return {
            "cpu_percent": psutil.cpu_percent(),
            "cores": psutil.cpu_count(),
            "memory_used_bytes": memory.total - memory.available,
            "memory_bytes": memory.total,
            "disk_free_bytes": _free_bytes(folder),
            "disk_read_bytes_per_s": rates[0],
            "disk_write_bytes_per_s": rates[1],
            "processors": self._processors(seconds),
            "gpus": [] if self._gpus is None else self._gpus.sample(),
        }

    def _processors(self, seconds: float) -> dict[str, Any]:
        """The watts that the processors' counters have counted since the last sample, or why they are not known."""
        now = time.monotonic()
        joules = sum(tally.advance(now) for tally in self._energy)
        gone = "; ".join(dict.fromkeys(tally.gone for tally in self._energy if tally.gone))
        if not self._energy or gone:
            return {"watts": None, "reason": gone or self._no_energy}
        return {"watts": joules / seconds, "reason": self._no_energy}

    @staticmethod
    def _disk_bytes() -> tuple[int, int] | None:
        found = psutil.disk_io_counters()
        return None if found is None else (found.read_bytes, found.write_bytes)


def _free_bytes(folder: Path) -> int | None:
    try:
        return psutil.disk_usage(str(folder)).free
    except OSError:  # the folder was deleted
        return None

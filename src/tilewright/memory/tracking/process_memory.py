"""How much memory this process holds now, and the most it held since a moment.

Three probes, picked by what the system allows and named in every measurement:

`vm_hwm`      Linux where `/proc/self/clear_refs` may be written: the kernel's own high-water mark of the
              resident set, reset at the start of a phase. Exact, no thread, about 50 us a reading.
`sampler`     elsewhere: a thread reads the resident set every 10 ms. It misses shorter peaks.
`torch.cuda`  on a CUDA device: the caching allocator's peak of allocated bytes.

The resident set counts pages, so it holds what tensors do not: the interpreter, shared libraries, code
that a compiler made, and pages that `malloc` keeps after a `free`. What is allocated and not freed at a moment
is live, what malloc keeps of freed blocks kept: the allocator's own count, on CUDA and with glibc. Called by
`memory.tracking.tracker`.
"""

import os
import threading
from pathlib import Path
from typing import Protocol

import psutil
import torch

from tilewright.memory.tracking.malloc import find_mallinfo

_SAMPLE_SECONDS = 0.010
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class MemoryProbe(Protocol):
    """Bytes held now (`current`): allocated and not freed, free but kept by the allocator (`live_and_kept`), and other
    things; and held at most since `reset_peak`."""

    name: str

    def current(self) -> int: ...

    def live_and_kept(self) -> tuple[int, int]: ...

    def peak(self) -> int: ...

    def reset_peak(self) -> None: ...

    def close(self) -> None: ...


class _ResidentSet:
    """The common part of both CPU probes: the resident set now, and glibc's count of live bytes if there is glibc."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._mallinfo = find_mallinfo()
        self._not_mallocs = 0
        self._not_mallocs = max(0, self._anonymous() - sum(self.live_and_kept()))

    def current(self) -> int:
        return self._process.memory_info().rss

    def live_and_kept(self) -> tuple[int, int]:
        if self._mallinfo is None:
            return self.current(), 0
        info = self._mallinfo()  # visits every free block: milliseconds where there are thousands
        live = info.uordblks + info.hblkhd
        return live, max(0, min(info.fordblks, self._anonymous() - self._not_mallocs - live))

    def _anonymous(self) -> int:
        """Anonymous bytes of the process's resident set, that no file has. Of what malloc counts as free only those
        take memory: pages that were returned to the system are free blocks still."""
        info = self._process.memory_info()
        return info.rss - getattr(info, "shared", 0)


class HighWaterMark(_ResidentSet):
    """The kernel's peak of the resident set (VmHWM), which writing 5 to clear_refs sets back to the present size.

    The mark is one a process: a reset is seen by everybody who reads it here, `getrusage` not included.
    """

    name = "vm_hwm"

    def __init__(self) -> None:
        super().__init__()
        self.reset_peak()

    @staticmethod
    def why_not() -> str | None:
        """Why the process's high-water mark of memory cannot be read or reset; None where it can."""
        if not _STATUS.exists():
            return "no /proc/self/status"
        try:
            _CLEAR_REFS.write_text("5")
        except OSError as error:
            return f"{_CLEAR_REFS} cannot be written ({error.strerror})"
        return None

    def peak(self) -> int:
        with open(_STATUS, "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
        raise AssertionError("/proc/self/status has no VmHWM line")

    def reset_peak(self) -> None:
        _CLEAR_REFS.write_text("5")

    def close(self) -> None:
        """Close the high-water mark of the process's memory: nothing to end."""


class Sampler(_ResidentSet):
    """A daemon thread that reads the resident set every 10 ms and keeps the largest."""

    name = "sampler"

    def __init__(self) -> None:
        super().__init__()
        self._peak = self.current()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self.current())

    def peak(self) -> int:
        self._peak = max(self._peak, self.current())
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.current()

    def close(self) -> None:
        """Close the sampler of the process's memory: end the thread."""
        self._stop.set()
        self._thread.join()


class CudaAllocator:
    """torch's caching allocator: bytes in live tensors. The CUDA context and cached free blocks are not in it."""

    name = "torch.cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset_peak()

    def current(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def live_and_kept(self) -> tuple[int, int]:
        """Live and kept bytes of the process by CUDA's allocator. Cached free blocks are not in `current`."""
        return self.current(), 0

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        """Reserved bytes of the process by CUDA's allocator, held from the driver, free blocks included."""
        return torch.cuda.memory_reserved(self._device)

    def close(self) -> None:
        """Close the probe of CUDA's allocator of the process: nothing to end."""


def make_probe(device: torch.device) -> MemoryProbe:
    """Make a probe of the process's memory, the best for the device: the allocator on CUDA, else the high-water mark,
    else the sampler."""
    if device.type == "cuda":
        return CudaAllocator(device)
    return HighWaterMark() if os.name == "posix" and HighWaterMark.why_not() is None else Sampler()

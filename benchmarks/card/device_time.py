"""How long a GPU works on one call, and how long the host takes to ask for it, apart.

Events around one call on an idle device count the host: the device waits between them for Python to launch. A
quantisation of 60 us took 200 that way, most of it dispatch. Here the device is kept busy while several calls are
queued behind each other, and the events stand around all of them. `held` says whether that worked: the host was done
before the device began.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.common import spread

BETWEEN_MS = 40.0
"""Work of the device between two events, at least."""
MOST_LAUNCHES = 50
"""Calls between two events, at most: a device takes some thousand launches before the host has to wait."""
SAMPLES = 7
MARGIN = 1.5
"""The device is held for so many times what queueing took."""


class Clock(Protocol):
    """A device with a queue."""

    def mark(self) -> Any:
        """A point in the queue."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Milliseconds of the device from one mark to another, both passed."""
        ...

    def hold(self, milliseconds: float) -> None:
        """Put work of so long into the queue."""
        ...

    def wait(self) -> None:
        """Until the queue is empty."""
        ...

    def now(self) -> float:
        """Milliseconds of the host's clock."""
        ...


class CudaClock:
    """The current CUDA device."""

    def __init__(self) -> None:
        self._cycles_per_ms = 1e6
        tried = 20.0
        for _ in range(2):  # the first launch loads the kernel
            start = self.mark()
            self.hold(tried)
            end = self.mark()
            self.wait()
            taken = self.between(start, end)
        self._cycles_per_ms *= tried / taken

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def hold(self, milliseconds: float) -> None:
        torch.cuda._sleep(int(milliseconds * self._cycles_per_ms))

    def wait(self) -> None:
        torch.cuda.synchronize()

    def now(self) -> float:
        return 1e3 * time.perf_counter()


def device_ms(run: Callable[[], object], clock: Clock | None = None) -> dict[str, Any]:
    """Median and samples of the device's time for one call, in ms, and `host_ms`, the host's for queueing one.

    Without a clock, on a CPU, wall time of one call: small sizes, for a try.

    Returns:
        What `spread` gives; host_ms; launches between two events; held: in all samples the device began after the host
        had queued them.
    """
    if clock is None:
        begin = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - begin)
        return spread([taken]) | {"host_ms": taken, "launches": 1, "held": True}
    for _ in range(3):  # compiles, tunes, allocates
        run()
    clock.wait()
    host = _queueing(run, 3, clock) / 3
    clock.wait()
    start = clock.mark()
    _queueing(run, 3, clock)
    end = clock.mark()
    clock.wait()
    launches = min(MOST_LAUNCHES, max(3, math.ceil(BETWEEN_MS / max(clock.between(start, end) / 3, 1e-3))))
    samples, held, hold = [], True, MARGIN * launches * host
    for _ in range(SAMPLES):
        clock.hold(hold)
        start = clock.mark()
        queued = _queueing(run, launches, clock)
        end = clock.mark()
        clock.wait()
        samples.append(clock.between(start, end) / launches)
        held &= queued <= hold
        hold = max(hold, MARGIN * queued)
    return spread(samples) | {"host_ms": host, "launches": launches, "held": held}


def _queueing(run: Callable[[], object], times: int, clock: Clock) -> float:
    """Milliseconds that the host takes to queue calls."""
    began = clock.now()
    for _ in range(times):
        run()
    return clock.now() - began

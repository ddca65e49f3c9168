"""Keeps what malloc holds free of a training process within its plan.

    heap = FreeHeap(memory_tracker, planned_bytes)
    heap.after_step()  # of each step
    heap.give_back()   # where the sizes that are asked for change, such as before an evaluation

Steps free and allocate the same sizes, and yet glibc's heap grows from step to step: an aligned block does not fit into
the hole that one like it has left, and each thread that ranks gather and reduce in has a heap of its own. On four ranks
a step of 1.05 GiB took 1.35 GiB ten steps later (docs/log.md). Returning free pages takes tens of milliseconds, so it
is done where a step would take more than was planned, and only as long as that helps.
"""

from collections.abc import Callable

from tilewright.memory.tracking.process_memory import trim_malloc
from tilewright.memory.tracking.tracker import MemoryTracker

PATIENCE = 10
"""Steps until free pages are returned again after it did not help."""


class FreeHeap:
    """Returns the free pages of this process to the system. Does nothing on a GPU, whose peaks have no such pages.

    Args:
        memory_tracker: of the run.
        planned_bytes: peak of a step; 0 where that is not known.
        trim: returns the pages.
    """

    def __init__(
        self, memory_tracker: MemoryTracker, planned_bytes: float, trim: Callable[[], None] = trim_malloc
    ) -> None:
        self._trim = trim
        self._memory_tracker = memory_tracker
        self._on_cpu = memory_tracker.device.type == "cpu"
        self._planned = planned_bytes
        self._peak = 0
        """Of the step before; 0 where free pages were returned since."""
        self._wait = 0
        """Steps for which nothing is returned: that did not help."""

    def after_step(self) -> None:
        """Return free pages where the next step would take more than planned, if it grows as this one has. One that
        takes more right after they were returned needs it: nothing is returned here for `PATIENCE` steps then."""
        if not self._on_cpu or not self._planned:
            return
        before, self._peak = self._peak, self._memory_tracker.take_step_peak()
        grown = max(0, self._peak - before) if before else 0
        self._wait = max(0, self._wait - 1)
        if self._peak + grown <= self._planned or self._wait:
            return
        if before:
            self.give_back()
        else:
            self._wait = PATIENCE

    def give_back(self) -> None:
        """Return free pages now."""
        if self._on_cpu:
            self._trim()
            self._peak = 0

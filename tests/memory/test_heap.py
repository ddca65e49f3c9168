"""Free pages of a training process stay within its plan: a heap that grows from step to step, played and real."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.memory.tracking.malloc import find_mallinfo
from tilewright.memory.tracking.tracker import PATIENCE, FreeHeap, MemoryTracker, step_peak

STEPS = 60


class Quiet:
    """A step without a line."""

    due = False


class Grows:
    """A tracker of steps that take `need`, and of a heap that grows by `growth` a step until it is trimmed."""

    device = torch.device("cpu")

    def __init__(self, need, growth):
        self.need, self.growth, self.free = need, growth, 0
        self.trims, self.peaks = [], []

    def take_step_peak(self):
        return self.peaks[-1]

    def trim(self):
        self.trims.append(len(self.peaks))
        self.free = 0

    def run(self, heap):
        for _ in range(STEPS):
            self.peaks.append(self.need + self.free)
            self.free += self.growth
            heap.after_step(Quiet())


@given(st.integers(500, 1000), st.integers(1, 100), st.integers(2, 500))
def test_steps_stay_within_the_plan_where_trimming_can_hold_them_there(need, growth, room):
    tracker = Grows(need, growth)
    planned = need + max(room, 2 * growth)
    tracker.run(FreeHeap(tracker, planned, tracker.trim))
    assert max(tracker.peaks) <= planned, f"peak {max(tracker.peaks)} of {planned} planned"
    rare = max(1, max(room, 2 * growth) // growth)  # steps that fit between two of them
    assert len(tracker.trims) <= STEPS / (rare - 1) + 1 if rare > 1 else True


@given(st.integers(500, 1000), st.integers(0, 100), st.integers(1, 400))
def test_a_step_that_needs_more_than_planned_is_not_trimmed_each_time(need, growth, missing):
    tracker = Grows(need, growth)
    tracker.run(FreeHeap(tracker, need - missing, tracker.trim))
    assert len(tracker.trims) <= STEPS // PATIENCE + 1


def test_nothing_is_returned_where_no_plan_is_known():
    tracker = Grows(1000, 100)
    tracker.run(FreeHeap(tracker, 0, tracker.trim))
    assert not tracker.trims


@pytest.mark.skipif(find_mallinfo() is None, reason="not glibc")
def test_free_pages_of_a_real_heap_are_returned():
    """In a process of its own, whose heap no other test sees."""
    subprocess.run([sys.executable, "-c", "from tests.memory import test_heap; test_heap.returned()"], check=True)


def returned():
    """Blocks that were freed between others that stay: the resident set falls, and they are no longer counted."""
    tracker = MemoryTracker("cpu")
    mib = 2**20
    with tracker.phase("forward"):
        blocks = [torch.ones(20_000) for _ in range(4000)]  # 80 kB each: none is mapped on its own
        stay = blocks[::2]
        del blocks
    live, kept = tracker._probe.live_and_kept()
    peak, before = tracker.take_step_peak(), tracker._probe.current()
    assert before > 300 * mib
    assert peak >= before - mib, "the kernel counts pages in batches for each processor"
    assert kept > 100 * mib
    FreeHeap(tracker, peak).give_back()
    now, after = tracker._probe.live_and_kept(), tracker._probe.current()
    assert before - after > 100 * mib, f"{(before - after) / mib:.0f} MiB returned of {kept / mib:.0f} free"
    assert now[0] == pytest.approx(live, rel=0.05)
    assert kept - now[1] > 100 * mib, "pages that were returned are counted as kept"
    assert len(stay) == 2000
    tracker.close()


def test_the_peak_of_a_step_leaves_other_work_out():
    tracker = MemoryTracker("cpu")
    with tracker.phase("forward"):
        pass
    first = tracker.take_step_peak()
    large = torch.ones(64 * 2**20 // 4)  # between the steps
    del large
    with tracker.phase("update"):
        pass
    assert tracker.take_step_peak() < first + 64 * 2**20
    assert step_peak({"between": 9, "load": 8, "forward": 3, "update": 5}) == 5
    assert step_peak({"load": 8}) == 0
    tracker.close()

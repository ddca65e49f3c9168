"""The memory tracker's bytes against sizes known by construction."""

import mmap
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tilewright.memory.tracking.process_memory import HighWaterMark, Sampler
from tilewright.memory.tracking.tensor_bytes import owner_bytes
from tilewright.memory.tracking.tracker import OWNERS, MemoryTracker

MIB = 2**20


def make_pair(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 64) -> None:
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()


class TestOwners:
    def test_counts_each_owner_exactly(self):
        model, optimizer = make_pair()
        step(model, optimizer)
        num_params = 2 * (64 * 64 + 64)
        owned = owner_bytes(model, optimizer, "cpu")
        assert owned["parameters"] == 4 * num_params
        assert owned["gradients"] == 4 * num_params
        assert owned["optimizer"] == 8 * num_params + 4 * 4, "two moments and a step counter for each of 4 tensors"
        assert owned["buffers"] == 0

    def test_shared_storage_counts_once(self):
        model = nn.ModuleDict({"embed": nn.Embedding(100, 8), "head": nn.Linear(8, 100, bias=False)})
        model["head"].weight = model["embed"].weight
        assert owner_bytes(model, None, "cpu")["parameters"] == 100 * 8 * 4

    def test_weight_copies_in_plain_attributes_are_buffers(self):
        model, _ = make_pair()
        model[0].low_copy = model[0].weight.detach().bfloat16()
        model[1].cache = {"v": (3, model[1].weight.detach().bfloat16())}
        model.register_buffer("table", torch.zeros(10))
        assert owner_bytes(model, None, "cpu")["buffers"] == 2 * 64 * 64 * 2 + 40

    def test_view_of_a_parameter_is_not_a_buffer(self):
        model, _ = make_pair()
        model[0].same = model[0].weight.detach()[:3]
        assert owner_bytes(model, None, "cpu")["buffers"] == 0

    def test_other_devices_do_not_count(self):
        with torch.device("meta"):
            model, _ = make_pair()
        assert owner_bytes(model, None, "cpu")["parameters"] == 0


@pytest.fixture(params=["vm_hwm", "sampler"])
def memory_tracker(request, monkeypatch):
    if request.param == "sampler":
        monkeypatch.setattr(HighWaterMark, "why_not", staticmethod(lambda: "test"))
    elif (reason := HighWaterMark.why_not()) is not None:
        pytest.skip(reason)
    memory_tracker = MemoryTracker("cpu")
    assert memory_tracker.method == request.param
    yield memory_tracker
    memory_tracker.close()


def hold(mib: int) -> mmap.mmap:
    """Resident memory that goes back to the system when dropped, past malloc, which may keep what it is given."""
    block = mmap.mmap(-1, mib * MIB)
    for start in range(0, mib * MIB, mmap.PAGESIZE):
        block[start] = 1
    time.sleep(0.05)
    return block


class TestLedger:
    def test_peak_goes_to_the_phase_where_it_was(self, memory_tracker):
        with memory_tracker.phase("forward"):
            hold(40)
        with memory_tracker.phase("backward"):
            hold(160)
        with memory_tracker.phase("update"):
            pass
        row = memory_tracker.snapshot(None, None)
        grown = {name: (peak - memory_tracker.baseline_bytes) / MIB for name, peak in row["phases"].items()}
        assert 38 < grown["forward"] < 60, grown
        assert 158 < grown["backward"] < 190, grown
        assert grown["update"] < 20, grown
        assert row["peak_phase"] == "backward"

    def test_owners_sum_to_the_peak(self, memory_tracker):
        model, optimizer = make_pair(1024)
        memory_tracker.watch(model)
        with memory_tracker.phase("forward"):
            kept = torch.ones(100 * MIB, dtype=torch.uint8)
            loss = model(torch.ones(2, 1024)).sum() + kept[0]
            time.sleep(0.05)
        with memory_tracker.phase("backward"):
            loss.backward()
            hold(250)  # the peak, also where the first optimizer step imports half of torch
        with memory_tracker.phase("update"):
            optimizer.step()
        optimizer.zero_grad()
        row = memory_tracker.snapshot(model, optimizer)
        assert tuple(row["owners"]) == OWNERS
        assert sum(row["owners"].values()) == row["peak_bytes"]
        num_bytes = 2 * (1024 * 1024 + 1024) * 4
        assert row["owners"]["parameters"] == num_bytes
        assert row["owners"]["gradients"] == num_bytes, "counted at the end of backward, though gone now"
        assert 99 * MIB < row["owners"]["activations"] < 103 * MIB, row["owners"]

    def test_activations_do_not_shrink_where_the_allocator_keeps_pages(self, memory_tracker):
        found = []
        for _ in range(3):
            with memory_tracker.phase("forward"):
                kept = [torch.ones(MIB, dtype=torch.uint8) for _ in range(40)]
            del kept
            found.append(memory_tracker.snapshot(None, None)["phase_owners"]["forward"]["activations"] / MIB)
        assert all(39 < mib < 42 for mib in found), found

    def test_each_phase_has_its_owners(self, memory_tracker):
        """Sizes known by construction, at each phase; each phase' owners sum to its peak."""
        with memory_tracker.phase("load"):
            model, optimizer = make_pair(1024)
        memory_tracker.watch(model)
        with memory_tracker.phase("forward"):
            kept = torch.ones(60 * MIB, dtype=torch.uint8)
            loss = model(torch.ones(2, 1024)).sum() + kept[0]
            time.sleep(0.05)
        with memory_tracker.phase("backward"):
            loss.backward()
        del kept, loss
        with memory_tracker.phase("update"):
            optimizer.step()
            optimizer.zero_grad()
        row = memory_tracker.snapshot(model, optimizer)
        num_bytes = 2 * (1024 * 1024 + 1024) * 4
        found = {name: owners | {"sum": sum(owners.values())} for name, owners in row["phase_owners"].items()}
        for name in ("load", "forward", "backward", "update"):
            assert found[name]["sum"] == row["phases"][name], found[name]
            assert found[name]["parameters"] == num_bytes
            assert found[name]["gradients"] == (num_bytes if name in ("backward", "update") else 0), name
            states = 0 if name == "load" else 2 * num_bytes + 4 * 4
            assert found[name]["optimizer"] == states, name
            held = found[name]["activations"] / MIB
            assert 59 < held < 63 if name in ("forward", "backward") else held == 0, (name, held)

    def test_what_a_keeper_tells_stands_for_what_is_found(self, memory_tracker):
        model, _ = make_pair()
        away = {"device": 3 * MIB, "host": MIB, "disk": 5 * MIB}
        memory_tracker.register_owner("parameters", lambda: away)
        memory_tracker.register_owner("parameters", lambda: {"device": MIB})
        memory_tracker.register_owner("optimizer", lambda: {"disk": 7 * MIB})
        with memory_tracker.phase("forward"):
            pass
        away |= {"device": 0, "disk": 2 * MIB}
        row = memory_tracker.snapshot(model, None)
        assert row["phase_owners"]["forward"]["parameters"] == 5 * MIB, "host and device are one memory here"
        assert row["tiers"] == {"disk": {"parameters": 5 * MIB, "optimizer": 7 * MIB}}, "the most there was"
        with pytest.raises(ValueError, match="owner is one of"):
            memory_tracker.register_owner("other", dict)

    def test_pages_that_malloc_keeps_are_told_apart_from_work(self, memory_tracker):
        if memory_tracker._probe.live_and_kept()[1] == 0:
            pytest.skip("malloc does not tell")
        blocks = [bytearray(60_000) for _ in range(1000)]  # below every threshold of mmap
        last = bytearray(60_000)  # keeps the heap from shrinking
        del blocks
        with memory_tracker.phase("update"):
            pass
        owners = memory_tracker.snapshot(None, None)["phase_owners"]["update"]
        assert owners["allocator"] > 50 * MIB, owners
        assert len(last)

    def test_snapshot_starts_a_new_window(self, memory_tracker):
        with memory_tracker.phase("forward"):
            hold(150)
        first = memory_tracker.snapshot(None, None)
        with memory_tracker.phase("forward"):
            pass
        second = memory_tracker.snapshot(None, None)
        assert second["peak_bytes"] < first["peak_bytes"] - 100 * MIB
        assert second["run_peak_bytes"] == first["peak_bytes"]

    def test_work_outside_phases_is_seen(self, memory_tracker):
        with memory_tracker.phase("forward"):
            pass
        hold(150)
        with memory_tracker.phase("forward"):
            pass
        row = memory_tracker.snapshot(None, None)
        assert row["peak_phase"] == "between"
        assert row["phases"]["forward"] < row["phases"]["between"] - 100 * MIB

    def test_nested_phases_keep_their_own_peaks(self, memory_tracker):
        with memory_tracker.phase("backward"):
            hold(60)
            with memory_tracker.phase("update"):
                hold(180)
        phases = memory_tracker.snapshot(None, None)["phases"]
        assert phases["update"] > phases["backward"] + 90 * MIB, phases

    def test_phase_is_closed_by_an_exception(self, memory_tracker):
        with pytest.raises(ZeroDivisionError), memory_tracker.phase("forward"):
            _ = 1 / 0
        with memory_tracker.phase("update"):
            pass
        assert {"forward", "update"} <= set(memory_tracker.snapshot(None, None)["phases"])


PHASE_COST = """
import time
from tilewright.memory.tracking.tracker import MemoryTracker
ledger, times = MemoryTracker("cpu"), []
for _ in range(200):
    start = time.thread_time()
    with ledger.phase("forward"):
        pass
    times.append(time.thread_time() - start)
print(sorted(times)[100])
"""


@pytest.mark.slow
def test_a_phase_costs_under_a_millisecond():
    """In a process of its own: reading glibc's books takes longer the more free pieces earlier tests left there."""
    printed = subprocess.run([sys.executable, "-c", PHASE_COST], capture_output=True, text=True, check=True).stdout
    assert float(printed) < 1e-3


def test_sampler_sees_a_peak_between_two_readings():
    sampler = Sampler()
    try:
        before = sampler.current()
        hold(100)
        assert sampler.peak() > before + 80 * MIB
        sampler.reset_peak()
        assert sampler.peak() < before + 60 * MIB
    finally:
        sampler.close()


def test_a_sampler_that_is_not_closed_does_not_keep_its_process():
    """A run that ends with an exception closes nothing, and must end nevertheless."""
    code = "from tilewright.memory.tracking.process_memory import Sampler; Sampler()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_peaks_are_taken_step_by_step_and_the_window_goes_on():
    memory_tracker = MemoryTracker("cpu")
    with memory_tracker.phase("forward"):
        big = torch.ones(64 * 2**20, dtype=torch.uint8)
    first = memory_tracker.take_peaks()
    del big
    with memory_tracker.phase("forward"):
        pass
    second = memory_tracker.take_peaks()
    assert first["forward"] >= second["forward"] + 48 * 2**20
    assert "backward" not in first
    assert memory_tracker.snapshot(None, None)["phases"]["forward"] == first["forward"]
    memory_tracker.close()

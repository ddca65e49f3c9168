"""Energy of GPUs from a library that answers as NVML documents: its energy counter, else power that is sampled."""

import ctypes

import pytest

from tilewright.energy.counter import Tally
from tilewright.energy.nvml import Nvml

OLD = 3
"""NVML_ERROR_NOT_SUPPORTED"""


class Library:
    """Two GPUs; the second one has no energy counter."""

    def __init__(self):
        self.millijoules, self.milliwatts, self.lost = 5_000_000, 300_000, False

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetName(self, handle, name, length):
        name.value = b"GPU of a test"
        return 0

    def nvmlDeviceGetUUID(self, handle, uuid, length):
        uuid.value = f"GPU-{handle.value:08d}-aaaa".encode()
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, millijoules):
        assert isinstance(millijoules._obj, ctypes.c_ulonglong)
        millijoules._obj.value = self.millijoules
        return 999 if self.lost else OLD if handle.value == 2 else 0

    def nvmlDeviceGetPowerUsage(self, handle, milliwatts):
        assert isinstance(milliwatts._obj, ctypes.c_uint)
        milliwatts._obj.value = self.milliwatts
        return 999 if self.lost else 0


def test_the_energy_counter_of_the_gpus_that_are_meant():
    library = Library()
    gpus = Nvml(library)
    assert gpus.counters([]) == ()
    assert gpus.counters(["00000009-aaaa"]) == ()
    (counter,) = gpus.counters(["00000001-aaaa"])  # as torch gives it
    assert (counter.part.how, counter.part.sampled) == ("NVML's energy counter", False)
    tally = Tally(counter)
    tally.begin(0.0)
    library.millijoules += 123_456
    assert tally.advance(1.0) == pytest.approx(123.456)
    library.lost = True
    assert tally.advance(2.0) == 0
    assert tally.gone == "the counter cannot be read any more: NVML answers 999"


def test_power_is_sampled_where_there_is_no_counter():
    """As constant from one sample to the next."""
    library = Library()
    (counter,) = Nvml(library).counters(["GPU-00000002-aaaa"])
    assert (counter.part.how, counter.part.sampled) == ("NVML's power, sampled", True)
    tally = Tally(counter)
    tally.begin(1_000.0)
    library.milliwatts = 100_000
    assert tally.advance(1_000.5) == pytest.approx(150.0)
    assert tally.advance(1_001.0) == pytest.approx(50.0)

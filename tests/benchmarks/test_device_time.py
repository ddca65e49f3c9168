"""Times of a device by events, on a device whose queue and host are simulated: what is measured is the device's."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.card.device_time import BETWEEN_MS, device_ms


@dataclass
class Simulated:
    """A host that takes `host` ms to queue a call and a device that works `device` ms on it, in order; `start` ms pass
    before the device begins what it was idle for."""

    host: float
    device: float
    start: float = 0.005
    host_now: float = 0.0
    device_free: float = 0.0
    calls: int = field(default=0)

    def queue(self, milliseconds):
        idle = self.device_free <= self.host_now
        self.device_free = max(self.device_free, self.host_now) + (self.start if idle else 0.0) + milliseconds

    def call(self):
        self.calls += 1
        self.host_now += self.host
        self.queue(self.device)

    def mark(self):
        return max(self.device_free, self.host_now)

    def between(self, start, end):
        return end - start

    def hold(self, milliseconds):
        self.queue(milliseconds)

    def wait(self):
        self.host_now = max(self.host_now, self.device_free)

    def now(self):
        return self.host_now


def naive(device):
    """Events around one call on an idle device."""
    device.wait()
    start = device.mark()
    device.call()
    return device.between(start, device.mark())


@given(st.floats(0.005, 5.0), st.floats(0.005, 20.0))
def test_the_device_s_time_whatever_the_host_takes(host, device):
    simulated = Simulated(host, device)
    found = device_ms(simulated.call, simulated)
    assert found["median"] == pytest.approx(device, rel=1e-6)
    assert found["max"] == pytest.approx(device, rel=1e-6)
    assert found["host_ms"] == pytest.approx(host, rel=1e-6)
    assert found["held"]
    assert naive(Simulated(host, device)) >= host + device, "what it was before"


def test_work_between_events_is_long_enough_and_not_endless():
    for device, launches in ((0.01, 50), (1.0, 40), (100.0, 3)):
        assert device_ms((simulated := Simulated(0.02, device)).call, simulated)["launches"] == launches
    assert BETWEEN_MS == 40


def test_a_host_that_is_slower_than_it_looked_is_told():
    """Queueing that takes longer than the device was held for: the number counts the host, and says so."""

    class Hiccup(Simulated):
        def call(self):
            super().call()
            self.host_now += 100.0 if self.calls == 20 else 0.0

    assert not device_ms((simulated := Hiccup(0.1, 1.0)).call, simulated)["held"]


def test_on_a_cpu_wall_time_once():
    calls = []
    found = device_ms(lambda: calls.append(1))
    assert len(calls) == found["launches"] == 1
    assert found["median"] == found["host_ms"]

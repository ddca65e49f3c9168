"""Joules by phase: nothing lost, nothing twice, and no figure where nothing was counted."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.energy.trees import Clock, FakeRapl
from tilewright.energy.counter import MeteredPart
from tilewright.energy.meter import EnergyMeter, EnergyUse, idle_watts
from tilewright.energy.processors import processor_counters


class Watts:
    """A counter of a part whose power a test sets."""

    wraps_at = None

    def __init__(self, clock, name="package-0"):
        self.part = MeteredPart(name, f"{name}: all of it", "a test")
        self.clock, self.watts, self.joules, self.at = clock, 0.0, 0.0, clock()

    def set(self, watts):
        self.joules += self.watts * (self.clock() - self.at)
        self.at, self.watts = self.clock(), watts

    def read(self, now):
        return self.joules + self.watts * (now - self.at)


PHASES = ("steps", "evaluation", "checkpoints")


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(1e-3, 30), st.floats(1, 900)), min_size=1, max_size=30))
def test_phases_add_up_to_what_was_counted(turns):
    """And each has its own joules where it lasts, whatever the order."""
    clock = Clock()
    counter = Watts(clock)
    meter = EnergyMeter([counter], clock=clock, thread=False)
    truth = dict.fromkeys(PHASES, 0.0)
    for phase, seconds, watts in turns:
        meter.at(phase)
        counter.set(watts)
        clock.now += seconds
        truth[phase] += seconds * watts
    use = meter.use()
    assert use.total_j == pytest.approx(sum(truth.values()))
    short = sum(max(watts for _, _, watts in turns) * 0.1 for _, seconds, _ in turns if seconds < 0.05)
    for phase in PHASES:
        assert use.joules[phase] == pytest.approx(truth[phase], abs=1e-6 + short)
        assert use.seconds[phase] == pytest.approx(sum(s for name, s, _ in turns if name == phase))


def test_waiting_for_data_is_its_own_phase():
    clock, waited = Clock(), [5.0]
    counter = Watts(clock)
    meter = EnergyMeter([counter], lambda: waited[0], clock=clock, thread=False)
    counter.set(100.0)
    meter.at("steps")
    clock.now += 10
    waited[0] += 2.5
    use = meter.use()
    assert dict(use.joules) == pytest.approx({"start": 0.0, "steps": 750.0, "waiting": 250.0})
    assert dict(use.seconds) == pytest.approx({"start": 0.0, "steps": 7.5, "waiting": 2.5}, abs=1e-9)


def test_a_use_goes_through_json_and_adds_up():
    clock = Clock()
    counter = Watts(clock)
    counter.set(10.0)
    meter = EnergyMeter([counter], clock=clock, thread=False)
    meter.at("steps")
    clock.now += 3
    one = EnergyUse.from_json(meter.use().to_json())
    both = one.plus(one)
    assert (one.total_j, both.total_j) == (30.0, 60.0)
    part = {"name": "package-0", "covers": "package-0: all of it", "how": "a test", "board": False}
    assert both.to_json()["parts"] == [part | {"joules": 60.0, "trouble": ""}]


def test_without_counters_there_is_no_number():
    clock = Clock()
    meter = EnergyMeter([], clock=clock, thread=False)
    meter.at("steps")
    clock.now += 5
    table = meter.use().to_json()
    assert (table["joules"], table["parts"]) == ({}, [])
    assert table["seconds"]["steps"] == 5
    assert not meter.reads


def test_a_part_that_goes_says_so_and_the_others_go_on(tmp_path):
    rapl, clock = FakeRapl(tmp_path), Clock()
    rapl.zone("intel-rapl:0", "package-0")
    rapl.zone("intel-rapl:1", "package-1")
    meter = EnergyMeter(processor_counters(tmp_path).counters, clock=clock, thread=False)
    meter.at("steps")
    for second in range(4):
        clock.now += 1
        rapl.add("intel-rapl:0", 50_000_000)
        if second == 2:
            (tmp_path / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
        elif second < 2:
            rapl.add("intel-rapl:1", 10_000_000)
        meter.use()
    parts = {part["name"]: part for part in meter.use().to_json()["parts"]}
    assert (parts["package-0"]["joules"], parts["package-1"]["joules"]) == (pytest.approx(200), pytest.approx(20))
    assert parts["package-0"]["trouble"] == ""
    assert "cannot be read any more: No such file" in parts["package-1"]["trouble"]


def test_the_thread_reads_and_ends():
    counter = Watts(time.monotonic)
    counter.set(1000.0)
    before = threading.active_count()
    with EnergyMeter([counter]) as meter:
        assert threading.active_count() == before + 1
        meter.at("steps")
        time.sleep(0.2)
        assert meter.use().joules["steps"] >= 200 * 0.9
    assert threading.active_count() == before


def test_idle_power_is_a_mean_or_none():
    steady = Watts(time.monotonic)
    steady.set(42.0)
    assert idle_watts([steady], 0.05) == pytest.approx(42.0, rel=0.01)
    assert idle_watts([Watts(time.monotonic)], 0.01) is None, "a counter that stands still"
    assert idle_watts([], 0.01) is None

"""Counters of joules, over everything that real ones do: wrap, reset, stand still, run backwards, forbid, disappear."""

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tests.energy.trees import RANGE_UJ, FakeRapl
from tilewright.energy.counter import MOST_RESETS, STILL_S, MeteredPart, Tally
from tilewright.energy.processors import FileCounter, PerfCounter, processor_counters

SCALE = "2.3283064365386962890625e-10"
PART = MeteredPart("package-0", "a processor", "a test")


class Listed:
    """A counter with these readings; None: it cannot be read."""

    part = PART

    def __init__(self, values, wraps_at=None):
        self.values, self.wraps_at = list(values), wraps_at

    def read(self, now):
        value = self.values.pop(0)
        if value is None:
            raise OSError(19, "No such device")
        return value


@examples(25)
@given(steps=st.lists(st.integers(1, 400_000_000), min_size=1, max_size=20), start=st.integers(0, RANGE_UJ - 1))
def test_every_joule_is_counted_over_wraps(tmp_path_factory, steps, start):
    rapl = FakeRapl(tmp_path_factory.mktemp("tree"))
    rapl.zone("intel-rapl:0", "package-0", start)
    (counter,) = processor_counters(rapl.root).counters
    tally, counted = Tally(counter), 0.0
    tally.begin(0.0)
    for second, uj in enumerate(steps, 1):
        rapl.add("intel-rapl:0", uj)
        counted += tally.advance(float(second))
    assert counted == pytest.approx(sum(steps) / 1e6, abs=1e-3)
    assert (tally.gone, tally.resets) == ("", 0)


@given(before=st.floats(1, 2.6e5), after=st.floats(0, 2.6e5), wraps=st.booleans())
def test_of_an_interval_that_cannot_be_told_nothing_is_counted(before, after, wraps):
    """Whatever a counter shows after a second: what is counted is below any real power, and never negative."""
    tally = Tally(Listed([before, after], 262_144.0 if wraps else None))
    tally.begin(0.0)
    joules = tally.advance(1.0)
    assert 0 <= joules <= 5_000
    grew = after - before if after >= before else (after + 262_144.0 - before if wraps else None)
    assert joules == (grew if grew is not None and grew <= 5_000 else 0.0)
    assert tally.resets == (grew is None or grew > 5_000)


def test_a_counter_that_runs_backwards_is_none():
    tally = Tally(Listed([1_000.0 - second for second in range(10)], 262_144.0))
    tally.begin(0.0)
    assert sum(tally.advance(float(second)) for second in range(1, 8)) == 0
    assert tally.gone == "the counter runs backwards or jumps"
    assert tally.resets == MOST_RESETS


def test_one_reset_does_not_end_a_counter():
    tally = Tally(Listed([5_000.0, 5_100.0, 7.0, 107.0]))
    tally.begin(0.0)
    assert [tally.advance(float(second)) for second in (1, 2, 3)] == [100, 0, 100]
    assert (tally.gone, tally.resets) == ("", 1)


def test_a_counter_that_stands_still_is_none():
    """As the zones of virtual machines do. One that idles slowly is read as it is."""
    tally = Tally(Listed([42.0] * 40))
    tally.begin(0.0)
    for second in range(1, 30):
        assert tally.advance(float(second)) == 0
        if tally.gone:
            break
    assert second == STILL_S
    assert tally.gone == f"the counter stood still for {STILL_S:.0f} s"
    slow = Tally(Listed([42.0 + second // 5 for second in range(40)]))
    slow.begin(0.0)
    assert sum(slow.advance(float(second)) for second in range(1, 36)) == 7
    assert slow.gone == ""


def test_a_counter_that_vanishes_keeps_what_it_counted():
    tally = Tally(Listed([1.0, 11.0, None]))
    tally.begin(0.0)
    assert (tally.advance(1.0), tally.advance(2.0), tally.advance(3.0)) == (10, 0, 0)
    assert tally.gone == "the counter cannot be read any more: No such device"


def test_packages_and_their_memory_are_summed_and_nothing_twice(tmp_path):
    """Cores are in their package, psys is the whole board, mmio is the package once more."""
    rapl = FakeRapl(tmp_path)
    rapl.zone("intel-rapl:0", "package-0")
    rapl.zone("intel-rapl:0:0", "core")
    rapl.zone("intel-rapl:0:1", "dram")
    rapl.zone("intel-rapl:1", "package-1-die-0")
    rapl.zone("intel-rapl:1:0", "dram")
    rapl.zone("intel-rapl:2", "psys")
    rapl.zone("intel-rapl-mmio:0", "package-0")
    found = processor_counters(tmp_path)
    names = ["memory of package-0", "memory of package-1-die-0", "package-0", "package-1-die-0"]
    assert sorted(counter.part.name for counter in found.counters) == names
    assert {counter.part.how for counter in found.counters} == {"RAPL through powercap"}
    assert len({counter.path.resolve() for counter in found.counters}) == 4


def test_why_a_machine_has_no_counter(tmp_path):
    reasons = ("no zone of RAPL under /sys/class/powercap", "no energy event of perf", "no socket's energy in hwmon")
    assert processor_counters(tmp_path).counters == ()
    assert processor_counters(tmp_path).reasons == reasons


def test_no_rights(tmp_path, monkeypatch):
    """Root may read everything, so the refusal is made."""
    rapl = FakeRapl(tmp_path)
    rapl.zone("intel-rapl:0", "package-0")

    def refuse(self, now):
        raise PermissionError(13, "Permission denied", str(self.path))

    monkeypatch.setattr(FileCounter, "read", refuse)
    found = processor_counters(tmp_path)
    assert found.counters == ()
    assert "only root may read" in found.reasons[0]


@pytest.mark.parametrize("text", ["", "abc", "12.5", "-"])
def test_a_file_without_a_number_is_a_reason(tmp_path, text):
    rapl = FakeRapl(tmp_path)
    rapl.zone("intel-rapl:0", "package-0")
    (tmp_path / "sys/class/powercap/intel-rapl:0/energy_uj").write_text(text)
    found = processor_counters(tmp_path)
    assert found.counters == ()
    assert "energy_uj cannot be read" in found.reasons[0]


def perf_tree(root):
    folder = root / "sys/bus/event_source/devices/power"
    (folder / "events").mkdir(parents=True)
    for name, text in {
        "type": "17", "cpumask": "0,32", "events/energy-pkg": "event=0x02", "events/energy-ram": "event=0x03",
        "events/energy-pkg.scale": SCALE, "events/energy-ram.scale": SCALE,
    }.items():  # fmt: skip
        (folder / name).write_text(f"{text}\n")


def test_perf_counts_where_powercap_may_not_be_read(tmp_path):
    perf_tree(tmp_path)
    opened = []

    def open_event(kind, number, cpu):
        opened.append((kind, number, cpu))
        path = tmp_path / f"{number}-{cpu}"
        path.write_bytes(struct.pack("=Q", 2**32 * (number + cpu)))
        return os.open(path, os.O_RDONLY)

    found = processor_counters(tmp_path, open_event)
    assert opened == [(17, 2, 0), (17, 2, 32), (17, 3, 0), (17, 3, 32)]
    assert [counter.part.name for counter in found.counters] == [
        "package-0", "package-1", "memory of package-0", "memory of package-1",
    ]  # fmt: skip
    assert found.reasons == ("no zone of RAPL under /sys/class/powercap",)
    assert [counter.read(0.0) for counter in found.counters] == [2.0, 34.0, 3.0, 35.0]
    for counter in found.counters:
        assert isinstance(counter, PerfCounter)
        os.close(counter.file)


def test_perf_that_is_forbidden_is_a_reason(tmp_path):
    perf_tree(tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    found = processor_counters(tmp_path, refuse)
    assert found.counters == ()
    assert found.reasons[1] == "perf's energy-pkg cannot be opened: Permission denied (perf_event_paranoid)"


def test_sockets_of_hwmon(tmp_path):
    folder = tmp_path / "sys/class/hwmon/hwmon3"
    folder.mkdir(parents=True)
    for number, label in enumerate(("Ecore000", "Esocket0", "Esocket1"), 1):
        (folder / f"energy{number}_label").write_text(f"{label}\n")
        (folder / f"energy{number}_input").write_text(f"{number * 1_500_000}\n")
    found = processor_counters(tmp_path)
    assert [(counter.part.name, counter.read(0.0)) for counter in found.counters] == [
        ("package-0", 3.0), ("package-1", 4.5),
    ]  # fmt: skip

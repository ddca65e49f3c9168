"""Speeds of host and disk: measured once, kept, used by the plan; nowhere to write is reported."""

import pytest

from tests.planner.rates import make_machine
from tilewright.planner.cost import storage_links
from tilewright.planner.cost.storage_links import LinkSpeed, as_links, disk_speed, existing, host_speed, known


@pytest.fixture
def measurements(monkeypatch):
    """Small slices, and a list for what is reported before each measurement."""
    monkeypatch.setattr(storage_links, "_DISK_SLICE", 2**16)
    return []


def test_a_disk_is_measured_once(tmp_path, measurements):
    machine, cache = make_machine(), tmp_path / "cache"
    assert known(machine, tmp_path, cache) == {}
    first = disk_speed(tmp_path / "not" / "there", machine, cache, progress=measurements.append)
    assert first.read > 0
    assert first.write > 0
    assert disk_speed(tmp_path, machine, cache, progress=measurements.append) == first
    assert len(measurements) == 1
    assert known(machine, tmp_path, cache) == {"disk": first}
    disk_speed(tmp_path, machine, cache, refresh=True, progress=measurements.append)
    assert len(measurements) == 2
    assert list(tmp_path.iterdir()) == [cache]


def test_a_cache_that_cannot_be_read_is_made_anew(tmp_path, measurements, caplog):
    machine, cache = make_machine(), tmp_path / "cache"
    disk_speed(tmp_path, machine, cache)
    (file,) = (cache / "links").iterdir()
    file.write_text("{}")
    assert disk_speed(tmp_path, machine, cache, progress=measurements.append).read > 0
    assert len(measurements) == 1
    assert "cannot be used" in caplog.text


def test_a_disk_that_cannot_be_written_is_told(tmp_path, measurements, caplog, monkeypatch):
    def fails(*_, **__):
        raise OSError("read-only file system")

    monkeypatch.setattr(storage_links, "measure_link", fails)
    assert disk_speed(tmp_path, make_machine(), tmp_path / "cache") is None
    assert "cannot be measured (read-only file system)" in caplog.text


def test_a_cpu_has_no_host_link(tmp_path):
    assert host_speed(make_machine(), tmp_path) is None
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_a_plan_takes_the_slower_direction_of_the_host_and_both_of_the_disk():
    found = as_links(LinkSpeed(50e9, 40e9), LinkSpeed(2e9, 1e9))
    assert (found.host, found.disk, found.disk_write) == (40e9, 2e9, 1e9)
    assert as_links(None, None).disk is None

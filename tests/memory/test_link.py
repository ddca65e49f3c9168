"""Rates of tiers, and that measuring leaves nothing behind."""

import pytest

from tilewright.core.errors import ConfigError
from tilewright.memory.offload.bandwidth import measure_link

MIB = 2**20


def test_a_disk_has_rates_with_and_without_the_systems_memory(tmp_path):
    rates = measure_link("disk", "cpu", folder=tmp_path, slice_bytes=MIB)
    assert min(rates.read, rates.write, rates.cached_read, rates.cached_write) > MIB
    assert list(tmp_path.iterdir()) == []


def test_host_memory_has_two(tmp_path):
    found = [measure_link("host", "cpu", slice_bytes=MIB, num_slices=2) for _ in range(5)]
    assert max(min(rates.read, rates.write) for rates in found) > 50 * MIB  # a busy machine stops for 0.1 s at times
    assert found[0].cached_read is found[0].cached_write is None


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        measure_link("disk", "cpu", folder=tmp_path / "file", slice_bytes=MIB)

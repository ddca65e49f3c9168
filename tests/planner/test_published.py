"""The table of published ceilings: complete, dense, and in order of what is known of these GPUs."""

import difflib
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.planner.rates import make_machine
from tilewright.core.errors import ConfigError
from tilewright.planner.machine.gpu_specs import TABLE, board_watts, find_published


def test_every_row_has_its_source_and_plausible_numbers():
    assert set(TABLE) == {"h100", "h200", "a100", "4090", "b200"}
    for row in TABLE.values():
        assert row.source
        assert 1e14 < row.bf16 < 1e16
        assert row.fp8 in (0.0, pytest.approx(2 * row.bf16, rel=0.01))
        assert 20e9 < row.memory < 200e9
        assert 5e11 < row.bandwidth < 1e13
        assert row.link in (31.5e9, 63e9)
        assert 300 <= row.watts <= 1200
        assert (row.fp8 > 0) == (row.capability >= (8, 9))


def test_the_power_of_a_board_is_known_under_its_published_and_its_reported_name():
    for row in TABLE.values():
        published = row.machine(make_machine(), 2**37)
        assert board_watts(published) == board_watts(replace(published, device_name=row.reported)) == row.watts
    assert board_watts(make_machine()) is None


def test_memory_is_what_drivers_report_and_not_what_is_sold():
    """A card sold with 24 GB shows 24,564 MiB in nvidia-smi, and less of it to a program."""
    sold = {"h100": 80, "h200": 141, "a100": 80, "4090": 24, "b200": 180}
    for name, row in TABLE.items():
        assert 0.92 * sold[name] < row.memory / 2**30 < sold[name], name
        assert find_published(name).machine(make_machine(), 2**37).device_memory_bytes == int(row.memory)


def test_ceilings_stay_below_the_published_peaks():
    for row in TABLE.values():
        rates = row.ceilings()
        assert rates.matmul_rate("bf16", 4096) < row.bf16
        assert rates.bandwidth < row.bandwidth
        assert rates.key == f"published {row.name}"


def test_a_machine_of_the_table_says_that_its_numbers_are_published():
    machine = find_published("H200").machine(make_machine(), 2**37)
    assert (machine.device, machine.capability, machine.host_memory_bytes) == ("cuda", (9, 0), 2**37)
    assert "published" in machine.device_name


def test_a_name_that_is_not_in_the_table():
    with pytest.raises(ConfigError, match="Unknown machine name") as caught:
        find_published("h9000")
    problem = caught.value.problems[0]
    assert problem.got
    assert "h200" in problem.need
    assert problem.try_


_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


@st.composite
def _typos(draw):
    """A name of the table with one letter more, less or other, or in capitals with one more."""
    name = draw(st.sampled_from(sorted(TABLE)))
    at, letter = draw(st.integers(0, len(name) - 1)), draw(st.sampled_from(_LETTERS))
    kind = draw(st.sampled_from(["more", "less", "other", "capitals"]))
    return {
        "more": name[:at] + letter + name[at:],
        "less": name[:at] + name[at + 1 :],
        "other": name[:at] + letter + name[at + 1 :],
        "capitals": name.upper() + letter,
    }[kind]


@given(_typos())
def test_a_name_that_is_nearly_one_of_the_table_has_it_to_try(wrong):
    assume(wrong.lower() not in TABLE)
    with pytest.raises(ConfigError, match="Unknown machine name") as caught:
        find_published(wrong)
    tried = caught.value.problems[0].try_.split(" or ")
    assert all(find_published(one.removeprefix("--on ")) for one in tried)
    distance = {one: difflib.SequenceMatcher(None, wrong.lower(), one).ratio() for one in TABLE}
    assert distance[tried[0].removeprefix("--on ")] == max(distance.values())

"""The switch of modes as a function of the step."""

import pytest

from tilewright.core.config import PrecisionSection
from tilewright.precision.schedule import ModeSchedule


def test_twenty_percent_of_tf32_then_bf16():
    schedule = ModeSchedule.from_section(PrecisionSection(mode="bf16_mixed", start_mode="tf32"), steps=50)
    assert [schedule.at(step) for step in (0, 9, 10, 49)] == ["tf32", "tf32", "bf16_mixed", "bf16_mixed"]


def test_without_start_mode_nothing_switches():
    schedule = ModeSchedule.from_section(PrecisionSection(mode="hybrid"), steps=50)
    assert {schedule.at(step) for step in range(50)} == {"hybrid"}


def test_disabled_is_fp32_throughout():
    section = PrecisionSection(enabled=False, mode="hybrid", start_mode="tf32")
    assert {ModeSchedule.from_section(section, 10).at(step) for step in range(10)} == {"fp32"}


@pytest.mark.parametrize("steps", [2, 3, 5, 1000])
@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.999])
def test_both_modes_run(steps, fraction):
    schedule = ModeSchedule.over(steps, mode="bf16_mixed", start_mode="fp32", start_fraction=fraction)
    assert (schedule.at(0), schedule.at(steps - 1)) == ("fp32", "bf16_mixed")

"""The switch of modes as a function of the step."""

import pytest

from tilewright.core.config.sections.precision import PrecisionSection
from tilewright.precision.policy.schedule import FormatSchedule, ModeSchedule, lr_factor


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


def test_products_begin_one_after_another_and_end_together():
    schedule = FormatSchedule.over(10, fp8_from=(0.1, 0.2, 0.3), fp8_until=0.8)
    assert [sum(schedule.floors(step).values()) for step in range(10)] == [3, 2, 1, 0, 0, 0, 0, 0, 3, 3]
    assert schedule.floors(2) == {"fprop": 0, "wgrad": 0, "dgrad": 1}


def test_only_the_forward_product_leaves_at_the_end():
    schedule = FormatSchedule.over(10, fp8_until=0.8, fp8_after="fprop")
    assert schedule.floors(7) == {"fprop": 0, "wgrad": 0, "dgrad": 0}
    assert schedule.floors(8) == {"fprop": 1, "wgrad": 0, "dgrad": 0}


def test_a_schedule_of_formats_from_a_section():
    assert FormatSchedule.from_section(PrecisionSection(), 100).constant
    section = PrecisionSection(fp8_from=(0.0, 0.0, 0.5), fp8_until=0.9, fp8_after="fprop")
    assert FormatSchedule.from_section(section, 100) == FormatSchedule((0, 0, 50), 90, "fprop")


def test_the_rate_falls_with_noise_and_stays_without_strength():
    assert [lr_factor(noise, 0.0) for noise in (0.0, 0.5)] == [1.0, 1.0]
    factors = [lr_factor(noise, 2.0) for noise in (0.0, 0.03, 0.5)]
    assert factors == [1.0, pytest.approx(1 / 1.06), 0.5]

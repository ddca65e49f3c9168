"""Simulated steps of torch's own tables against the closed formulas of the papers."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner.simulate.conftest import LARGE, SMALL
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.pass_costs import KindSeconds, PassCosts, StepCosts
from tilewright.planner.simulate.schedule_formulas import (
    Failures,
    idle_in_one_wave,
    idle_of_deferred,
    idle_of_zb_h1,
    in_flight_of_1f1b,
    in_flight_of_interleaved,
)
from tilewright.planner.simulate.simulated_step import SimulatedStep, idle_by_cause

ROUNDING = 1e-9
"""Sums of some thousand FP64 numbers near one."""


def step_of(table, kinds=None, rows=1):
    sizes = {"ranks": table.num_ranks, "stages": table.num_stages, "microbatches": table.num_microbatches}
    return SimulatedStep.of(table, StepCosts(PassCosts.even(rows=rows, kinds=kinds, **sizes)))


def check_idle(tables, p, m):
    for schedule in ("gpipe", "1f1b"):
        for kinds in (None, KindSeconds(3.0, 1.2, 0.8)):
            found = step_of(tables[Pipeline(p, schedule), m], kinds).idle
            assert found == pytest.approx(idle_in_one_wave(p, m), abs=ROUNDING), (schedule, kinds)
    for v in (2, 4):
        if table := tables.get((Pipeline(p, "interleaved", v), m)):
            assert step_of(table).idle == pytest.approx(idle_in_one_wave(p, m, v), abs=ROUNDING), v
    if table := tables.get((Pipeline(p, "interleaved_deferred", 2), m)):
        for kinds in (KindSeconds(), KindSeconds(2.0, 1.2, 0.8)):
            found = step_of(table, kinds).idle
            assert found == pytest.approx(idle_of_deferred(p, m, 2, kinds), abs=ROUNDING), kinds
    found = step_of(tables[Pipeline(p, "interleaved_zero_bubble", 1), m]).idle
    assert found == pytest.approx(idle_of_zb_h1(p, m, KindSeconds()), abs=5e-4)


def check_in_flight(tables, p, m):
    assert step_of(tables[Pipeline(p, "gpipe"), m]).peaks == pytest.approx([m] * p)
    found = step_of(tables[Pipeline(p, "1f1b"), m]).peaks
    assert found == pytest.approx([in_flight_of_1f1b(p, m, rank) for rank in range(p)])
    for v in (2, 4):
        for table in filter(
            None, (tables.get((Pipeline(p, name, v), m)) for name in ("interleaved", "interleaved_deferred"))
        ):
            expected = [in_flight_of_interleaved(p, m, v, rank) for rank in range(p)]
            assert step_of(table).peaks == pytest.approx(expected), v
    for pipeline in (Pipeline(p, "zbv", 2), Pipeline(p, "interleaved_zero_bubble", 1)):
        if table := tables.get((pipeline, m)):
            assert max(step_of(table).peaks) <= p + ROUNDING, pipeline


@pytest.mark.parametrize(("p", "m"), [*SMALL, pytest.param(32, 256, marks=pytest.mark.slow)])
def test_idle(tables, p, m):
    check_idle(tables, p, m)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m"), LARGE)
def test_idle_of_long_rows(large_tables, p, m):
    check_idle(large_tables, p, m)


@pytest.mark.parametrize(("p", "m"), SMALL)
def test_activations_in_flight(tables, p, m):
    check_in_flight(tables, p, m)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "m"), LARGE)
def test_activations_in_flight_in_long_rows(large_tables, p, m):
    check_in_flight(large_tables, p, m)


@pytest.mark.parametrize("rows", [1, 3])
def test_equal_costs_are_idle_for_the_schedule_alone(tables, rows):
    for (pipeline, m), table in tables.items():
        if pipeline.pp <= 3:
            step = step_of(table, rows=rows)
            causes = idle_by_cause(step)
            assert causes["filling and draining"] == pytest.approx(step.idle, abs=ROUNDING), (pipeline, m)
            assert sum(causes.values()) == pytest.approx(step.idle, abs=ROUNDING)


def clocked(failures, stretches, draw):
    """Useful seconds over all, of so many stretches of steps between checkpoints, failures drawn one by one."""
    spent, left = 0.0, draw.expovariate(1 / failures.every_s)
    span = failures.interval_s + failures.stall_s
    for _ in range(stretches):
        needed = span
        while left < needed:  # it fails, and begins again after recovery
            spent += left
            left, needed = draw.expovariate(1 / failures.every_s), failures.recover_s + span
        spent, left = spent + needed, left - needed
    return stretches * failures.interval_s / spent


@pytest.mark.parametrize(
    "failures",
    [
        Failures(9720.0, 900.0, 0.0, 900.0), Failures(9720.0, 900.0, 60.0, 900.0), Failures(3600.0, 1800.0, 120.0, 0.0),
        Failures(3600.0, 60.0, 30.0, 1200.0),
    ],
)  # fmt: skip
def test_goodput_is_that_of_failures_drawn_one_by_one(failures):
    found = clocked(failures, 60_000, random.Random("goodput"))
    print(failures, found, failures.goodput)
    assert failures.goodput == pytest.approx(found, rel=0.02)


TIMES = st.floats(1e-3, 1e7)


@given(TIMES, TIMES, TIMES, TIMES)
def test_goodput_of_any_times_is_a_share(every, interval, stall, recover):
    """Failures every second leave nothing."""
    failures = Failures(every, interval, stall, recover)
    assert 0.0 <= failures.goodput <= 1.0
    assert 0.0 <= failures.best_interval_s < math.inf
    assert Failures(1.0, 900.0, 0.0, 900.0).goodput == pytest.approx(900.0 * math.exp(-1800.0), abs=1e-300)


@pytest.mark.parametrize("stall", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("every", [1800.0, 9720.0, 1e6])
def test_no_interval_is_better_than_the_best_one(stall, every):
    best = Failures(every, 1.0, stall, 60.0).best_interval_s
    goodput = Failures(every, best, stall, 60.0).goodput
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert Failures(every, factor * best, stall, 60.0).goodput <= goodput
    if every > 100 * stall:  # Young's square root holds for rare failures
        assert best == pytest.approx(math.sqrt(2 * stall * every), rel=0.1)

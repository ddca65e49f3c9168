"""The solver against brute force, on every case that hypothesis draws."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.planner.cost.solve_layers import (
    COSTS,
    ChoiceGroup,
    Cost,
    Phase,
    PlanProblem,
    host_bytes,
    phase_bytes,
    seconds,
    solve,
)

NUMBERS = st.integers(0, 20)
COST = st.builds(Cost, st.integers(1, 50), *[NUMBERS] * 8)


@st.composite
def problems(draw):
    names = ["a", "b"][: draw(st.integers(1, 2))]
    groups = tuple(
        ChoiceGroup(name, draw(st.integers(1, 4)), tuple(draw(st.lists(COST, min_size=1, max_size=4))))
        for name in names
    )
    some = st.frozensets(st.sampled_from(names))
    running = st.sampled_from(["none", "forward", "backward"])
    phase = st.builds(Phase, st.just("phase"), st.fixed_dictionaries({"work": NUMBERS}), some, some, running)
    phases = tuple(draw(st.lists(phase, min_size=1, max_size=3)))
    host = draw(st.one_of(st.integers(0, 80), st.just(math.inf)))
    return PlanProblem(
        groups,
        phases,
        draw(st.integers(1, 200)),
        host,
        draw(st.integers(0, 10)),
        draw(st.one_of(st.integers(0, 80), st.just(math.inf))),
    )


def compositions(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def every(problem):
    """All counts with (seconds, peak, host, disk), estimated layer by layer."""
    for counts in itertools.product(*(compositions(g.count, len(g.costs)) for g in problem.groups)):
        layers = [
            (group.name, cost)
            for group, row in zip(problem.groups, counts, strict=True)
            for cost, count in zip(group.costs, row, strict=True)
            for _ in range(count)
        ]
        peaks = []
        for phase in problem.phases:
            size = phase.base + sum(cost.held for _, cost in layers)
            for group, row in zip(problem.groups, counts, strict=True):
                size += sum(cost.once for cost, count in zip(group.costs, row, strict=True) if count)
            size += sum(cost.kept for name, cost in layers if name in phase.kept)
            size += sum(cost.gradient for name, cost in layers if name in phase.gradients)
            running = {
                "none": [0],
                "forward": [c.forward for _, c in layers],
                "backward": [c.backward for _, c in layers],
            }
            peaks.append(size + max(running[phase.transient]))
        host = problem.host_base + sum(cost.host for _, cost in layers)
        disk = sum(cost.disk for _, cost in layers)
        yield counts, sum(cost.seconds for _, cost in layers), max(peaks), host, disk


@examples(60)
@given(problems())
def test_optimum_equals_brute_force(problem):
    limits = (problem.device_budget, problem.host_budget, problem.disk_budget)
    fitting = [row for row in every(problem) if all(a <= b for a, b in zip(row[2:], limits, strict=True))]
    answer = solve(problem)
    found = answer and answer.counts
    if not fitting:
        # Only what fits exactly may be lost to the solver's tolerance, and here everything is a whole number.
        assert found is None
        return
    best = min(row[1] for row in fitting)
    tight = [row for row in fitting if all(a < b for a, b in zip(row[2:], limits, strict=True))]
    if found is None or seconds(problem, found) > best:
        assert not tight or min(row[1] for row in tight) > best, "a fitting plan with room to spare was missed"
    if found is not None:
        assert max(phase_bytes(problem, phase, found) for phase in problem.phases) <= problem.device_budget
        assert host_bytes(problem, found) <= problem.host_budget


@examples(40)
@given(problems())
def test_smallest_peak_equals_brute_force(problem):
    fitting = [row for row in every(problem) if row[3] < problem.host_budget and row[4] < problem.disk_budget]
    found = solve(problem, smallest=True)
    if fitting:
        assert found is not None
        assert found.gap <= 1e-9
        least = min(row[2] for row in fitting)
        assert max(phase_bytes(problem, phase, found.counts) for phase in problem.phases) <= least + 1e-6


def test_a_peak_that_moves_between_phases_is_caught():
    """Keeping is faster but does not fit forward; recomputing does not fit backward; one of each does."""
    keep, again = Cost(1, kept=10, backward=5), Cost(2, kept=1, backward=12)
    everything = frozenset("a")
    phases = (Phase("forward", {}, everything), Phase("backward", {}, everything, transient="backward"))
    for budget, want in ((13, None), (14, ((0, 2),)), (22, ((0, 2),)), (23, ((1, 1),)), (25, ((2, 0),))):
        answer = solve(PlanProblem((ChoiceGroup("a", 2, (keep, again)),), phases, budget + 1e-3, math.inf))
        assert (answer and answer.counts) == want


def test_options_of_no_use_do_not_change_the_answer():
    good = Cost(1, held=2)
    answer = solve(PlanProblem((ChoiceGroup("a", 3, (Cost(2, held=3), good, good)),), (Phase("x", {}),), 7, 0))
    assert answer is not None
    assert answer.counts == ((0, 3, 0),)
    assert all(getattr(good, name) >= 0 for name in COSTS)

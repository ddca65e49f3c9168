"""Seconds of a plan, in all and by part, are sums of operations; bytes of its phases, by owner, of holdings."""

import random
from dataclasses import replace

import pytest

from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tilewright.core.memory_plan import STEP_PHASES
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.cost.operations import HIDDEN_SHARE, Operation, by_part, total_s
from tilewright.planner.cost.owners import OWNERS, on_host, owners_at
from tilewright.planner.cost.solve_layers import COSTS, ChoiceGroup, Cost, PlanProblem, host_bytes, phase_bytes
from tilewright.planner.cost.step_phases import OffloadFlags, phases
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner

STREAMS = ("compute", "fetch", "store", "ranks")


def drawn():
    visits, parts = ("forward", "backward", "norm"), ("matmuls", "attention", "communication")
    return [
        Operation(random.choice(visits), random.choice(parts), random.choice(STREAMS), random.random())
        for _ in range(40)
    ]


def seconds_of(operations, visit, stream):
    return sum(one.seconds for one in operations if (one.visit, one.stream) == (visit, stream))


@pytest.mark.parametrize("number", range(20))
def test_streams_of_a_visit_overlap_and_visits_follow_each_other(number):
    found = drawn()
    expected = 0.0
    for visit in {one.visit for one in found}:
        compute, up, down, ranks = (seconds_of(found, visit, stream) for stream in STREAMS)
        expected += max(compute, up, down) + HIDDEN_SHARE * (min(compute, up) + min(compute, down)) + ranks
    assert total_s(found) == pytest.approx(expected, rel=1e-12)
    assert sum(by_part(found).values()) == pytest.approx(expected, rel=1e-12)
    random.shuffle(found)
    assert total_s(found) == pytest.approx(expected, rel=1e-12)


def sliced(device="cuda", **memory):
    recipe = make_recipe(
        memory={"executor": "layer_major", **memory}, train={"global_batch_size": 8, "micro_batch_size": 2}
    )
    planner = Planner(recipe, 512, make_machine(64 * GIB, device), make_rates())
    return planner.as_it_stands(Budget(64 * GIB, 64 * GIB, Links(1e9 if device == "cuda" else None, 1e8)))


PLANS = {
    "standard": lambda: make_plan(make_recipe(), 512, make_machine(), make_rates()),
    "several micro-batches": lambda: make_plan(
        make_recipe(train={"global_batch_size": 8, "micro_batch_size": 2}), 512, make_machine(), make_rates()
    ),
    "layer by layer": sliced,
    "layer by layer on a CPU": lambda: sliced("cpu", offload_activations="cpu", offload_optimizer="disk"),
    "states on the host": lambda: sliced(offload_optimizer="cpu"),
    "all on the disk": lambda: sliced(offload_optimizer="disk", offload_params="disk", offload_activations="disk"),
}


@pytest.mark.parametrize("name", PLANS)
def test_seconds_of_a_plan_are_sums_of_its_operations(name):
    plan = PLANS[name]()
    for row in plan.rows:
        assert total_s(row.operations) == pytest.approx(row.cost.seconds, rel=1e-12)
        moved = sum(one.bytes for one in row.operations if one.stream in ("fetch", "store"))
        away = {row.choice.parameters, row.choice.states, row.choice.inputs} != {"device"}
        assert (moved > 0) == away, row
    whole = total_s(plan.around) + sum(row.count * total_s(row.operations) for row in plan.rows)
    assert plan.step_s == pytest.approx(whole, rel=1e-12)
    shown = plan.rest_s + sum(row.count * plan.row_s(row) for row in plan.rows)
    assert plan.step_s == pytest.approx(shown, rel=1e-12), "the table of layers is the whole step"
    assert plan.seconds.keys() >= set(by_part(()))


@pytest.mark.parametrize("name", PLANS)
def test_bytes_of_a_phase_are_sums_of_holdings(name):
    """What the solver adds up without owners is what owners have together; no owner is without a name."""
    plan = PLANS[name]()
    places = {place for row in plan.rows for place in (row.choice.parameters, row.choice.states)}
    flags = OffloadFlags(is_offloaded=places != {"device"}, on_disk="disk" in places)
    ends = frozenset(row.name for row in plan.rows if not row.indices)
    groups = tuple(ChoiceGroup(row.name, row.count, (row.cost,)) for row in plan.rows)
    problem, counts = PlanProblem(groups, (), 0, 0), tuple((row.count,) for row in plan.rows)
    for phase in phases(plan.shape, plan.setting, plan.recipe, plan.machine, ends, flags):
        owners = owners_at(phase, plan.rows)
        assert set(owners) == set(OWNERS)
        assert sum(owners.values()) == pytest.approx(phase_bytes(problem, phase, counts), rel=1e-12), phase
    if plan.host:
        assert sum(on_host(plan.rows).values()) == pytest.approx(host_bytes(problem, counts), rel=1e-12)
        assert set(on_host(plan.rows)) < set(plan.host)
    for row in plan.rows:
        again = Cost.of(row.cost.seconds, row.cost.holdings)
        assert [getattr(again, one) for one in COSTS] == [getattr(row.cost, one) for one in COSTS]
        assert all(one.bytes > 0 for one in row.cost.holdings)


@pytest.mark.parametrize("name", PLANS)
def test_a_scaled_plan_takes_so_much_more_memory_and_time(name):
    plan = PLANS[name]()
    other = plan.scaled(1.25, 3.0)
    assert other.step_s == pytest.approx(3 * plan.step_s, rel=1e-12)
    assert other.step_bytes == pytest.approx(1.25 * plan.step_bytes, rel=1e-12)
    assert other.step_bytes == pytest.approx(
        max(sum(row.values()) for phase, row in other.phases.items() if phase.startswith(STEP_PHASES))
    )
    assert (other.memory_plan, other.settings()) == (plan.memory_plan, plan.settings())
    assert replace(other, phases=plan.phases, rows=plan.rows, around=plan.around) == plan

"""Advice holds: what a plan prints as a change is accepted by the same command, and does what was said of it.

Over shipped recipes, typed settings, budgets and two machines with made-up rates: every row with
`--section.field value` is typed as well, every budget that is named is given, every plan that is written is executed.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tests.cover import covering
from tests.planner.rates import GIB, make_machine, make_plan, make_rates
from tests.planner.test_cost import HF
from tilewright.core.config.change_recipe import on_machine
from tilewright.core.config.load import Loaded, load_recipe
from tilewright.core.errors import FitError
from tilewright.core.units import parse_bytes
from tilewright.planner.advice.describe_plan import no_plan
from tilewright.planner.advice.recipe_changes import candidates, cheapest_changes, idle_memory
from tilewright.planner.cost.layer_choices import Links
from tilewright.planner.decide import How, decide, free_planner
from tilewright.planner.plan import Budget
from tilewright.planner.plan_file import to_toml
from tilewright.planner.site import Site
from tilewright.training.planning.does_not_fit import changes_to_fit, replanned
from tilewright.training.planning.resolve_plan import plan_run

SAME = 1 + 1e-3
"""Seconds that are equal: the solver's answers are a ten-thousandth apart (`planner.GAP`)."""
FAST = {fmt: {256: 5e13, 2048: 5e14} for fmt in ("fp32", "tf32", "bf16", "fp16")} | {"fp8": {256: 6e13, 2048: 1e15}}
MACHINES = {
    "cpu": (make_machine(64 * GIB, compiler="g++"), make_rates(), Links(None, None)),
    "card": (
        make_machine(80 * GIB, "cuda"),
        make_rates(matmul=FAST, attention=dict.fromkeys(FAST, 1e14), bandwidth=2e12, exp=1e12),
        Links(25e9, None),
    ),
}
HOST = 96 * GIB
COMMANDS = {
    "default": ("default",),
    "default, slices": ("default", "--memory.executor", "layer_major"),
    "cpu_50m, full": ("cpu_50m", "--train.activation_checkpoint", "full"),
    "default, many rows": ("default", "--train.global_batch_size", "128", "--train.micro_batch_size", "128"),
    "tiny_moe": ("tiny_moe",),
    "slice_cpu": ("slice_cpu",),
    "slice_cpu, exact": ("slice_cpu", "--optim.clip", "two_pass"),
    "zero_cpu, 2 shards": ("zero_cpu", "--parallel.dp_shard", "2", "--train.micro_batch_size", "1"),
}
ON = pytest.mark.parametrize("where", MACHINES)


def cases(*rest: object, commands: Iterable[str] = COMMANDS) -> list:
    """Each command on each machine with each of `rest`; by default the first three of them on one of the
    machines with one of `rest`: each machine, and each of these."""
    found = []
    for number, command in enumerate(commands):
        for place, where in enumerate(MACHINES):
            for at, one in enumerate(rest):
                first = place == number % 2 and at == number // 2 % len(rest) and number < 3
                found.append(pytest.param(where, command, one, marks=() if first else pytest.mark.slow))
    return found


def load(command: tuple[str, ...], *more: str, device_budget: float = 0) -> Loaded:
    """The recipe as typed, on the machine that is planned for."""
    arguments = [*command[1:], "--run.device", "auto", *more]
    arguments += ["--plan.device_memory", str(int(device_budget))] if device_budget else []
    return load_recipe(command[0], arguments, environ={})


def planner_for(loaded: Loaded, where: str):
    return free_planner(loaded, site_of(loaded, where))


def site_of(loaded: Loaded, where: str, folder=Path("unused"), **more) -> Site:
    """A place whose disk and link nobody has to measure."""
    machine, rates, links = MACHINES[where]
    links = Links(links.host, 1e9)
    return Site(loaded.recipe.data.vocab_size, machine, rates, folder, links=links, disk=1e12, **more)


def plain_plan(loaded: Loaded, where: str):
    machine, rates, _ = MACHINES[where]
    recipe = on_machine(loaded, machine).recipe
    return make_plan(recipe, recipe.data.vocab_size, machine, rates)


@cache
def whole(command: tuple[str, ...], where: str) -> int:
    """What a recipe takes as it stands, where there is little more."""
    plan = plain_plan(load(command), where)
    peak = int(plan.peak_bytes) - plan.reserve_bytes
    return peak + plain_plan(load(command, device_budget=peak), where).reserve_bytes  # some of it a share of the budget


def budget_of(command: tuple[str, ...], where: str, share: float) -> Budget:
    return Budget(share * whole(command, where), HOST, MACHINES[where][2])


def pasted(text: str) -> list[str]:
    """The settings of a printed row."""
    found = re.findall(r"--[a-z_]+\.[a-z0-9_]+ [^\s:;,]+", text)
    return " ".join(found).split()


def named(text: str, place: str) -> float:
    """A budget that a text names."""
    return float(parse_bytes(re.findall(rf"([\d.]+[GM]iB) on the {place}", text)[0]))


@pytest.mark.parametrize(
    ("where", "command", "share", "how"),
    covering(tuple(MACHINES), tuple(COMMANDS), (0.7, 1.0, 0.4, 4.0), get_args(How), pairs=False),
)
def test_changes_of_a_plan_are_accepted_and_as_fast_as_they_say(where, command, share, how):
    loaded, budget = load(COMMANDS[command]), budget_of(COMMANDS[command], where, share)
    site = site_of(loaded, where, given=budget)
    found = decide(loaded, site, how)
    plan = found if found.accepted else None
    for change in cheapest_changes(loaded.recipe, budget, plan, replanned(loaded, site, how)):
        typed = pasted(str(change))
        assert bool(typed) == bool(change.settings)
        other = load(COMMANDS[command], *typed)
        again = decide(other, site_of(other, where, given=change.plan.budget), how)
        assert again.accepted, str(change)
        assert again.step_s <= SAME * change.plan.step_s, str(change)
        assert again.peak_bytes <= change.plan.budget.device
        if plan is not None:
            assert again.tokens_per_s > plan.tokens_per_s


@pytest.mark.parametrize(
    ("where", "command", "share"), covering(tuple(MACHINES), tuple(COMMANDS), (1.1, 4.0), pairs=False)
)
def test_the_fastest_plan_is_no_slower_than_the_recipe_as_it_stands(where, command, share):
    loaded, budget = load(COMMANDS[command]), budget_of(COMMANDS[command], where, share)
    stands = plain_plan(load(COMMANDS[command], device_budget=budget.device), where)
    found = planner_for(loaded, where).plan(budget)
    assert stands.keeps_margin
    assert found is not None
    assert found.step_s <= 1.005 * stands.step_s, (found.setting, found.seconds, stands.seconds)


@pytest.mark.parametrize(("where", "command", "disk"), cases(False, True))
def test_the_smallest_budget_is_one(where, command, disk):
    loaded = load(COMMANDS[command])
    planner = planner_for(loaded, where)
    links = Links(MACHINES[where][2].host, 1e9 if disk else None)
    small = Budget(1.0, HOST, links, 1e12 if disk else 0.0)
    assert planner.plan(small) is None
    (problem,) = no_plan(planner, small, []).problems
    for line in problem.need.splitlines():
        given = Budget(named(line, "device"), HOST, links, 1e12 if disk else 0.0)
        if "on the host" in line:
            given = Budget(given.device, named(line, "host"), links, given.disk)
        if "on the disk" in line:
            given = Budget(given.device, given.host, links, named(line, "disk"))
        found = planner.plan(given)
        assert found is not None, line
    first = named(problem.need, "device")
    assert planner.plan(Budget(0.98 * first, HOST, links, small.disk)) is None


@pytest.mark.parametrize(("where", "command", "share"), cases(0.4, 0.8))
def test_fixes_of_a_recipe_as_it_stands_make_it_fit(where, command, share, tmp_path):
    budget = share * whole(COMMANDS[command], where)
    plan = plain_plan(load(COMMANDS[command], device_budget=budget), where)
    assert plan.state != "fits"
    loaded = load(COMMANDS[command], device_budget=budget)
    for fix in changes_to_fit(on_machine(loaded, MACHINES[where][0]).recipe, site_of(loaded, where, tmp_path)):
        typed = pasted(str(fix))
        assert typed
        loaded = load(COMMANDS[command], *typed, device_budget=budget)
        again = plain_plan(loaded, where)
        assert int(again.peak_bytes) <= int(fix.plan.peak_bytes)
        assert again.step_s <= SAME * fix.plan.step_s
        if fix.fits:
            _, run = plan_run(loaded, site_of(loaded, where, tmp_path))
            assert not run.decided
            assert run.step_s <= SAME * fix.plan.step_s


@pytest.mark.parametrize(
    ("where", "command", "share"), cases(0.05, 0.45, commands=("default", "cpu_50m, full", "slice_cpu"))
)
def test_what_train_says_of_a_run_that_does_not_fit(where, command, share, tmp_path):
    arguments, budget = COMMANDS[command], share * whole(COMMANDS[command], where)
    loaded = load(arguments, device_budget=budget)
    try:
        _, run = plan_run(loaded, site_of(loaded, where, tmp_path))
    except FitError as error:
        (problem,) = error.problems
    else:
        assert run.peak_bytes <= budget
        return
    given = load(arguments, device_budget=named(problem.need, "device"))
    assert plan_run(given, site_of(given, where, tmp_path))[1].state == "fits"
    for line in problem.try_.splitlines():
        typed = pasted(line)
        if typed:
            other = load(arguments, *typed, device_budget=budget)
            _, run = plan_run(other, site_of(other, where, tmp_path))
            assert run.state == "fits", line
            assert run.step_s <= SAME * seconds(line), line


def seconds(line: str) -> float:
    """The step time that a row names, as far as its digits tell."""
    value, unit = re.findall(r"([\d.]+) (µs|ms|s) a step", line)[0]
    return 1.006 * float(value) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


@pytest.mark.parametrize(
    ("where", "command", "share"), covering(tuple(MACHINES), tuple(COMMANDS), (0.7, 1.0, 0.4, 4.0), pairs=False)
)
def test_train_executes_the_plan_that_was_written(where, command, share, tmp_path):
    budget = budget_of(COMMANDS[command], where, share)
    found = planner_for(load(COMMANDS[command]), where).plan(budget)
    if found is None:
        return
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(found))
    loaded = load(COMMANDS[command], "--memory.plan", str(path), device_budget=budget.device)
    _, run = plan_run(loaded, site_of(loaded, where, tmp_path))
    assert run.decided
    assert run.step_s == pytest.approx(found.step_s, rel=1e-6)
    assert run.least_device <= budget.device


@pytest.mark.parametrize(("where", "command"), covering(tuple(MACHINES), tuple(COMMANDS), pairs=False))
def test_idle_memory_is_explained(where, command):
    loaded, budget = load(COMMANDS[command]), budget_of(COMMANDS[command], where, 4.0)
    planner = planner_for(loaded, where)
    found = planner.plan(budget)
    assert found is not None
    said = idle_memory(planner, found)
    if found.peak_bytes < 0.8 * budget.device:
        assert said
    if "is given" in said:
        (name,) = re.findall(r"([a-z_]+\.[a-z_]+) is given", said)
        assert f"--{name}" in COMMANDS[command]
    elif said:
        more = planner.plan(Budget(2 * budget.device, budget.host, budget.links))
        assert more is not None
        assert more.step_s >= found.step_s / SAME


@ON
@pytest.mark.parametrize("name", ["default", "cpu_50m"])
def test_a_mode_is_offered_as_faster_where_planning_it_says_so(where, name):
    loaded, budget = load((name,)), budget_of((name,), where, 4.0)
    found = planner_for(loaded, where).plan(budget)
    replan = replanned(loaded, site_of(loaded, where), "fastest")
    offered = [str(change) for change in cheapest_changes(loaded.recipe, budget, found, replan)]
    modes = (load((name,), "--precision.mode", mode) for mode in ("bf16_mixed", "fp8_tile"))
    bf16, fp8 = (plain_plan(one, where).step_s for one in modes)
    assert where == "card" or fp8 > bf16
    if fp8 > bf16:
        assert not any("fp8_tile" in text for text in offered)


@ON
def test_an_executor_that_is_typed_says_nothing_of_what_layers_keep(where):
    command = COMMANDS["default, slices"]
    found = planner_for(load(command), where).plan(budget_of(command, where, 4.0))
    assert found.setting.executor == "layer_major"
    assert {row.choice.activations for row in found.rows if row.indices} == {"keep"}


SHARDED = ("zero_cpu", "--parallel.dp_shard", "2", "--train.micro_batch_size", "1")


@pytest.mark.parametrize(
    ("where", "more"), covering(tuple(MACHINES), [(), ("--parallel.reshard_after_forward", "false")], pairs=False)
)
def test_reduced_gradients_are_offered_where_they_make_shards_fit(where, more, tmp_path):
    """By a plan that decides and by a recipe as it stands: gradients that are whole from one micro-batch to the next
    are what does not fit."""
    command = SHARDED + more
    loaded = load(command)
    planner, reduced = (planner_for(load(command, *each), where) for each in ((), ("--parallel.reduce_each", "true")))
    wide = Budget(1e12, HOST, MACHINES[where][2])
    least, enough = (one.smallest(wide).least_device for one in (planner, reduced))
    assert enough < 0.99 * least
    budget = Budget((least + enough) / 2, HOST, MACHINES[where][2])
    assert planner.plan(budget) is None
    offered = cheapest_changes(loaded.recipe, budget, None, replanned(loaded, site_of(loaded, where), "fastest"))
    (change,) = [one for one in offered if one.settings == {"parallel.reduce_each": True}]
    assert change.keeps_result
    assert pasted(str(change)) == ["--parallel.reduce_each", "True"]
    again = planner_for(load(command, *pasted(str(change))), where).plan(budget)
    assert again is not None
    assert again.step_s <= SAME * change.plan.step_s

    stands = load(command, "--memory.plan", "", device_budget=budget.device)
    fixes = changes_to_fit(stands.recipe, site_of(stands, where, tmp_path))
    assert all("parallel.reduce_each" in fix.settings for fix in fixes if fix.fits and fix.keeps_result)


@pytest.mark.slow
def test_compiling_the_layers_of_a_foreign_model_is_offered(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(HF))
    command = ("default", "--model.kind", "hf", "--model.path", str(tmp_path), "--data.vocab_size", "512")
    loaded, budget = load(command), Budget(float(64 * GIB), HOST, Links(None, None))
    found = planner_for(loaded, "cpu").plan(budget)
    assert found is not None
    settings = {"train.compile": "on"}
    assert (settings, True) in list(candidates(loaded.recipe, found))
    changed = replanned(loaded, site_of(loaded, "cpu"), "fastest")(settings, budget)
    again = planner_for(load(command, "--train.compile", "on"), "cpu").plan(budget)
    assert changed is not None
    assert again is not None
    assert again.step_s == pytest.approx(changed.step_s)
    assert again.step_s < found.step_s
    assert "compiled ones keep less" in " ".join(again.notes)

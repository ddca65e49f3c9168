"""Fixed choices, the margin, the price of a given memory plan, and plans of a run that continues."""

from dataclasses import replace

import pytest

from tests.planner.rates import GIB, make_machine, make_rates, make_recipe
from tests.planner.test_planner import LINKS, deep_recipe, on_h200
from tilewright.core.config.change_recipe import changed
from tilewright.core.memory_plan import KIND_OF, LayerMemory, MemoryPlan
from tilewright.ops.base.compile import rounds_as_eager
from tilewright.planner.cost.layer_choices import GlobalConfig, Links
from tilewright.planner.cost.step_phases import FRAGMENTS
from tilewright.planner.model import constraints
from tilewright.planner.model.constraints import Constraints, fuses, same_bits
from tilewright.planner.plan import Budget
from tilewright.planner.planner import Planner
from tilewright.planner.replan import Replanner

MIB = 2**20


def on_cpu(recipe, vocab_size=4096, **arguments):
    return Planner(recipe, vocab_size, make_machine(64 * GIB), make_rates(), **arguments)


def cpu_budget(size, disk=None):
    return Budget(size, 0.0, Links(None, disk), 64 * GIB if disk else 0.0)


@pytest.fixture(scope="module")
def deep():
    return on_h200(deep_recipe(), 4096)


@pytest.fixture(scope="module")
def on_a_cpu():
    return on_cpu(deep_recipe())


def tight(planner, share=0.5):
    """A budget between the least that the recipe's own setting needs and what it takes with everything kept."""
    fixed = planner.with_fixed(Constraints(executor="standard", micro_batch_size=8))
    wide = fixed.plan(cpu_budget(64 * GIB)).peak_bytes
    least = fixed.smallest(cpu_budget(64 * GIB)).peak_bytes
    assert least < 0.9 * wide
    return fixed, least + share * (wide - least)


def test_the_margin_stays_free(deep):
    recipe = changed(deep.recipe, {"plan.margin": 0.2})
    with_margin = deep.with_recipe(recipe)
    least = deep.smallest(Budget(1.0, 64 * GIB, LINKS)).peak_bytes / (1 - FRAGMENTS)
    budget = Budget(1.1 * least, 64 * GIB, LINKS)
    assert deep.plan(budget) is not None
    assert with_margin.plan(budget) is None
    found = with_margin.plan(replace(budget, device=1.3 * least))
    assert found.peak_bytes <= 0.8 * 1.3 * least + FRAGMENTS * 1.3 * least


@pytest.mark.parametrize(
    ("fixed", "executor", "words"),
    [
        (Constraints(executor="layer_major"), "layer_major", {}),
        (Constraints(micro_batch_size=2), "standard", {}),
        (Constraints(loss_chunk_bytes=12345), "standard", {}),
        (Constraints(activations=frozenset(["recompute"])), "standard", {"activations": {"recompute"}}),
        (
            Constraints(executor="layer_major", parameters="host", states="host", inputs="host"),
            "layer_major",
            {"parameters": {"host"}, "states": {"host"}, "activations": {"recompute"}, "inputs": {"host"}},
        ),
        (
            Constraints(executor="layer_major", mlp_chunks=4, activations=frozenset(["recompute"])),
            None,
            {"mlp_chunks": {4}},
        ),
    ],
)
def test_what_is_fixed_is_not_chosen(deep, fixed, executor, words):
    plan = deep.with_fixed(fixed).plan(Budget(64 * GIB, 64 * GIB, LINKS))
    assert executor in (None, plan.setting.executor)
    assert fixed.micro_batch_size in (None, plan.setting.micro_batch_size)
    assert fixed.loss_chunk_bytes in (None, plan.setting.loss_chunk_bytes)
    for name, allowed in words.items():
        assert {getattr(row.choice, name) for row in plan.rows if row.indices} == allowed


def test_inputs_that_are_rounded_are_not_kept_exactly_in_some_layers(deep):
    recipe = changed(deep.recipe, {"train.checkpoint_inputs": "fp8"})
    plan = deep.with_recipe(recipe).plan(Budget(64 * GIB, 64 * GIB, LINKS))
    assert {row.choice.activations for row in plan.rows if row.indices} == {"recompute"}


def test_a_placement_has_the_price_of_the_plan_that_made_it(deep, on_a_cpu):
    for planner, budget in ((deep, Budget(1.5 * GIB, 64 * GIB, LINKS)), (on_a_cpu, cpu_budget(2 * GIB, disk=1e9))):
        plan = planner.plan(budget)
        again = planner.priced(plan.setting, plan.memory_plan, plan.budget)
        assert again.step_s == pytest.approx(plan.step_s)
        assert again.peak_bytes == pytest.approx(plan.peak_bytes)
        assert {n: dict(p) for n, p in again.phases.items()} == {n: pytest.approx(p) for n, p in plan.phases.items()}
        assert again.memory_plan == plan.memory_plan
        assert again.host == pytest.approx(plan.host)
    with pytest.raises(ValueError, match="3 layers"):
        deep.priced(plan.setting, MemoryPlan.uniform(3), budget)


def test_on_a_cpu_the_host_tier_is_the_device(on_a_cpu):
    setting = (
        on_a_cpu.with_fixed(Constraints(executor="layer_major", micro_batch_size=2)).plan(cpu_budget(64 * GIB)).setting
    )
    budget = cpu_budget(64 * GIB)
    here = MemoryPlan.uniform(16, activations="recompute")
    there = MemoryPlan.uniform(16, activations="recompute", parameters="host", states="host", inputs="host")
    here, there = (on_a_cpu.priced(setting, one, budget) for one in (here, there))
    for owner in ("parameters", "optimizer"):
        assert there.phases["load"][owner] == pytest.approx(here.phases["load"][owner])
    assert there.phases["backward"]["activations"] == pytest.approx(here.phases["backward"]["activations"])
    assert there.peak_bytes > here.peak_bytes  # buffers too


def test_the_journal_is_counted_and_lies_on_a_disk_only_where_slices_do():
    recipe = changed(deep_recipe(), {"optim.clip": "delayed"})
    planner = on_cpu(recipe)
    without = on_cpu(changed(recipe, {"memory.rollback": "checkpoint"}))
    wide = cpu_budget(64 * GIB, disk=1e9)
    with_journal, free = planner.plan(wide), without.plan(wide)
    assert with_journal.disk_bytes == 0
    state = sum(free.phases["load"][owner] for owner in ("parameters", "optimizer"))
    assert with_journal.phases["loss"]["work"] - free.phases["loss"]["work"] == pytest.approx(state, rel=1e-3)
    least = planner.smallest(wide)
    assert least.disk_bytes > state


def test_a_run_that_goes_on_changes_no_number(on_a_cpu):
    planner, device = tight(on_a_cpu)
    plan = planner.plan(cpu_budget(device))
    again = Replanner(planner, plan.setting, plan.memory_plan, cpu_budget(device))
    assert again.plan(device).memory_plan == plan.memory_plan
    wider = again.plan(64 * GIB)
    assert {layer.activations for layer in wider.memory_plan.layers} == {"keep"}
    assert wider.step_s < plan.step_s
    less = again.plan(device, memory_factor=1.05)
    kept = [sum(layer.activations == "keep" for layer in one.memory_plan.layers) for one in (plan, less, wider)]
    assert kept[0] >= kept[1]
    assert less.setting == plan.setting == wider.setting
    assert less.peak_bytes <= device * (1 + 1e-9)
    assert again.plan(100 * MIB) is None
    assert again.smallest().peak_bytes <= less.peak_bytes
    assert again.plan(64 * GIB, time_factor=2).step_s == pytest.approx(2 * wider.step_s)


def test_longer_rows_keep_less(on_a_cpu):
    planner, device = tight(on_a_cpu, share=1.0)
    setting = planner.plan(cpu_budget(device * 1.1)).setting
    again = Replanner(planner, setting, MemoryPlan.uniform(16), cpu_budget(1.1 * device))
    short, long = again.plan(1.1 * device, 512), again.plan(1.1 * device, 2048)
    assert {layer.activations for layer in short.memory_plan.layers} == {"keep"}
    assert {layer.activations for layer in long.memory_plan.layers} != {"keep"}
    now = again.predict(MemoryPlan.uniform(16), 512)
    assert now.memory_plan == MemoryPlan.uniform(16)
    assert now.peak_bytes == pytest.approx(short.peak_bytes)
    assert again.predict(MemoryPlan.uniform(16), 2048).peak_bytes > 1.5 * now.peak_bytes


def test_layers_cut_differently_keep_their_cuts_when_planned_again(deep):
    """Whatever the budget: tiles and blocks of each layer stay, since they change last bits, and the rest may move."""
    cuts = [(4, 0), (1, 0), (16, 0)]
    layers = tuple(
        LayerMemory(activations="recompute", mlp_chunks=cuts[i % 3][0], attention_block=cuts[i % 3][1])
        for i in range(16)
    )
    memory_plan = MemoryPlan(layers=layers)
    wide = Budget(64 * GIB, 64 * GIB, LINKS)
    setting = deep.with_fixed(Constraints(executor="layer_major", micro_batch_size=8)).plan(wide).setting
    again = Replanner(deep, setting, memory_plan, wide)
    whole, least = again.plan(64 * GIB), again.smallest()
    middle = again.plan((whole.peak_bytes + least.peak_bytes) / 2)
    for found in (whole, middle, least):
        assert [(one.mlp_chunks, one.attention_block) for one in found.memory_plan.layers] == [
            cuts[i % 3] for i in range(16)
        ]
        priced = again.predict(found.memory_plan)
        fragments = FRAGMENTS * (priced.budget.device - found.budget.device)  # counted of the budget
        assert priced.peak_bytes - fragments == pytest.approx(found.peak_bytes)
        assert priced.step_s == pytest.approx(found.step_s)
    assert len(set(middle.memory_plan.layers)) > 3
    assert whole.step_s <= middle.step_s <= least.step_s * (1 + 1e-3)
    assert least.peak_bytes <= middle.peak_bytes <= whole.peak_bytes


def test_layers_that_may_keep_different_things_when_fused(deep):
    """A GPU's compiled layers: `selective` has other bits there, so each layer keeps to its own kind."""
    recipe = make_recipe(model={"num_layers": 4})
    machine = replace(make_machine(64 * GIB), device="cuda")
    planner = Planner(recipe, 512, machine, make_rates())
    kinds = ("selective", "keep", "attention", "recompute")
    memory_plan = MemoryPlan(layers=tuple(LayerMemory(activations=kind) for kind in kinds))
    again = Replanner(planner, GlobalConfig.of(recipe), memory_plan, Budget(64 * GIB, 64 * GIB, LINKS))
    for found, other in ((again.plan(64 * GIB), "keep"), (again.smallest(), "recompute")):
        expected = [kind if kind in ("selective", "matmuls", "attention") else other for kind in kinds]
        assert [layer.activations for layer in found.memory_plan.layers] == expected


def test_formats_that_scale_the_loss_stay_with_the_standard_executor():
    for precision in (
        {"mode": "hybrid"},
        {"mode": "bf16_mixed", "rules": [{"match": "*", "compute": "fp16"}]},
        {"mode": "bf16_mixed", "start_mode": "hybrid"},
    ):
        planner = on_cpu(make_recipe(precision=precision), 512)
        assert planner.with_fixed(Constraints(executor="layer_major")).plan(cpu_budget(64 * GIB)) is None


@pytest.mark.parametrize(
    ("sections", "fused", "kind", "same"),
    [
        ({}, False, "keep", set(KIND_OF.values())),
        ({}, True, "keep", {"keep", "recompute"}),
        ({}, True, "selective", {"selective"}),
        ({"precision": {"mode": "fp8_tile"}}, True, "keep", {"keep"}),
        ({"precision": {"mode": "fp8_tile"}}, False, "keep", set(KIND_OF.values())),
        ({"train": {"checkpoint_inputs": "fp8"}}, False, "recompute", {"recompute"}),
    ],
)
def test_what_a_layer_keeps_moves_only_where_that_changes_no_bit(sections, fused, kind, same, monkeypatch):
    recipe = make_recipe(**sections)
    assert same_bits(recipe, fused, kind) == same
    assert fuses(True, make_machine(64 * GIB)) != rounds_as_eager()
    monkeypatch.setattr(constraints, "rounds_as_eager", lambda: True)
    machine = replace(make_machine(64 * GIB), device="cuda") if fused else make_machine(64 * GIB)
    assert fuses(True, machine) == fused
    planner = Planner(recipe, 512, machine, make_rates())
    setting, budget = GlobalConfig.of(recipe), Budget(64 * GIB, 64 * GIB, LINKS)
    again = Replanner(planner, setting, MemoryPlan.uniform(3, activations=kind), budget)
    assert {layer.activations for layer in again.plan(64 * GIB).memory_plan.layers} <= same

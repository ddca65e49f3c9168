"""Plans: within their budgets at every phase, and equal to sums by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.rates import GIB, make_machine, make_rates, make_recipe
from tests.planner.shapes import DENSE_42B
from tests.planner.test_cost import MOE
from tilewright.core.config.load import Loaded
from tilewright.core.errors import ConfigError
from tilewright.core.integer_program import OutOfTime
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.planner.advice.describe_plan import timeline, why
from tilewright.planner.advice.plan_sweep import largest
from tilewright.planner.advice.recipe_changes import cheapest_changes
from tilewright.planner.cost.layer_choices import GlobalConfig, Links, choices
from tilewright.planner.cost.layer_cost import layer_cost, layer_operations
from tilewright.planner.cost.operations import by_part, total_s
from tilewright.planner.cost.solve_layers import solve
from tilewright.planner.cost.step_phases import FRAGMENTS, stages
from tilewright.planner.machine.gpu_specs import find_published
from tilewright.planner.machine.process_bytes import KIND_BYTES
from tilewright.planner.model.constraints import Constraints
from tilewright.planner.plan import Budget
from tilewright.planner.plan_file import is_plan_file, read_plan, to_toml
from tilewright.planner.planner import Planner
from tilewright.planner.site import Site
from tilewright.training.planning.does_not_fit import replanned

H200 = find_published("h200")
LINKS = Links(50e9, None)
OPEN = frozenset(("optim.moments", "optim.master_weights"))
DEEP = {"dim": 512, "num_layers": 16, "num_heads": 8, "ffn_dim": 2048}


def on_h200(recipe, vocab_size=512, formats=frozenset()):
    machine = H200.machine(make_machine(), 128 * GIB)
    return Planner(recipe, vocab_size, machine, H200.ceilings(), formats)


def place(planner, budget):
    """The planner's recipe and place, as commands have them."""
    written = {"memory.loss_chunk_bytes", *(OPEN - planner.open_formats)}
    site = Site(planner.vocab_size, planner.machine, planner.rates, Path("unused"), given=budget)
    return Loaded(planner.recipe, dict.fromkeys(written, "file made-up.toml"), "made-up"), site


def deep_recipe(**train):
    checkpoint = {"interval": 0, "async_save": False}
    train = {"global_batch_size": 8} | train
    return make_recipe(model=DEEP, data={"seq_len": 1024}, train=train, checkpoint=checkpoint, plan={"margin": 0})


@pytest.fixture(scope="module")
def deep():
    return on_h200(deep_recipe(), 4096)


@pytest.fixture(scope="module")
def plans(deep):
    """Plans in ever larger memory."""
    least = deep.smallest(Budget(1.0, 64 * GIB, LINKS)).peak_bytes / (1 - FRAGMENTS)
    sizes = [least * 1.001, least * 1.3, least * 2, 4 * GIB, 64 * GIB]
    return [deep.plan(Budget(size, 64 * GIB, LINKS)) for size in sizes]


def test_every_phase_is_within_the_budget_and_every_layer_is_there_once(plans):
    for plan in plans:
        assert plan.peak_bytes <= plan.budget.device * (1 + 1e-9)
        assert plan.host_bytes <= plan.budget.host
        assert sorted(i for row in plan.rows for i in row.indices) == list(range(16))
        assert [row.name for row in plan.rows if not row.indices] == ["embedding", "head"]


def test_more_memory_is_never_slower(plans):
    took = [plan.step_s for plan in plans]
    assert took == sorted(took, reverse=True)
    assert took[0] > took[-1]
    assert plans[-1].setting.executor == "standard"
    assert {row.choice.activations for row in plans[-1].rows if row.indices} == {"keep"}
    assert plans[0].setting.executor == "layer_major"


def test_seconds_by_part_add_up_to_what_was_minimised(deep, plans):
    for plan in plans:
        head = total_s(plan.around)
        layers = sum(row.count * row.cost.seconds for row in plan.rows)
        assert plan.step_s == pytest.approx(head + layers, rel=1e-6)


def test_the_timeline_peaks_where_the_plan_does(plans):
    for plan in plans:
        top = max(sum(row.values()) for _, row in timeline(plan))
        assert 0.8 * plan.peak_bytes <= top <= plan.peak_bytes * (1 + 1e-9), plan.setting


def test_42_billion_parameters_on_one_card_by_hand():
    train = {"global_batch_size": 4, "micro_batch_size": 4}
    sections = {"model": DENSE_42B, "data": {"seq_len": 8192}, "train": train, "optim": {"clip": "delayed"}}
    layer_groups = {"executor": "layer_major"}
    recipe = make_recipe(**sections, memory=layer_groups | {"rollback": "checkpoint"})
    planner = on_h200(recipe, 128256, OPEN)
    plan = planner.plan(Budget(139 * GIB, 128 * GIB, LINKS))
    assert plan is not None
    with_journal = planner.with_recipe(make_recipe(**sections, memory=layer_groups))
    budget = Budget(139 * GIB, 128 * GIB, LINKS)
    assert with_journal.plan(budget) is None  # its bytes again, on the host
    changes = cheapest_changes(with_journal.recipe, budget, None, replanned(*place(with_journal, budget), "fastest"))
    assert any("--memory.rollback checkpoint" in str(change) for change in changes)
    assert plan.setting.executor == "layer_major"
    assert plan.setting.moments == "8bit"
    load = plan.phases["load"]
    held = load["parameters"] + load["optimizer"] + plan.host["parameters"] + plan.host["optimizer"]
    stored = 2 if plan.setting.master in ("stochastic", "split24") else 4
    beside = 1 if plan.setting.master == "split24" else 0
    assert held == pytest.approx(42_456_552_960 * (stored + beside + 2 * (1 + 4 / 128)), rel=1e-3)
    assert plan.narrowed["optim.moments"] == "8bit"
    assert "changes what is learned" in plan.verdict
    closed = on_h200(recipe, 128256)
    closed._finder = planner._finder
    assert closed.plan(Budget(139 * GIB, 128 * GIB, LINKS)) is None


def test_a_layer_by_hand():
    """Recomputed, parameters on the device, states on the host; the link hides behind what is computed, or does not."""
    planner = Planner(deep_recipe(), 4096, make_machine(64 * GIB, "cuda"), make_rates(adam={"8bit": 1e9}))
    shape = planner.shape(planner.recipe)
    (found,) = shape.classes
    setting = GlobalConfig("layer_major", 2, 4, "8bit", "fp32", 2**26, passes=1)
    choice = LayerMemory(states="host", activations="recompute")
    weights = 512 * 512 * 4 + 3 * 512 * 2048
    assert found.num_parameters == weights + 2 * 512
    slow, fast = (
        layer_cost(found, choice, setting, shape, planner.recipe, planner.rates, Links(speed, None))
        for speed in (1e3, 1e15)
    )
    states = 2 * (found.num_parameters + 4 * (weights // 128 + 2 * 512))  # a scale per element of the norms' vectors
    assert slow.host == states
    assert slow.held == 4 * found.num_parameters
    assert slow.kept == 4 * 2 * 1024 * 512 * 2
    parts = by_part(layer_operations(found, choice, setting, shape, planner.recipe, planner.rates, Links(1e15, None)))
    tokens = 8 * 1024
    assert parts["matmuls"] == pytest.approx(6 * tokens * weights / 1e12)
    assert parts["attention"] == pytest.approx(3.5 * tokens * 4 * 512 * (1025 / 2) / 1e11)
    assert fast.seconds == pytest.approx(sum(parts.values()), rel=1e-3)
    assert slow.seconds == pytest.approx(states / 1e3, rel=0.02)  # the rest hides behind it, forward apart


def test_stages_follow_backward_and_join_classes_that_take_turns(plans):
    def made(name, indices):
        return replace(plans[0].shape.classes[0], name=name, indices=indices)

    assert stages([made("a", (0, 1)), made("b", (2, 3, 4))]) == [["b"], ["a"]]
    assert stages([made("a", (0, 2, 4)), made("b", (1, 3, 5))]) == [["b", "a"]]


def test_one_micro_batch_has_a_moment_behind_each_class():
    recipe = make_recipe(model=MOE, train={"global_batch_size": 1}, checkpoint={"interval": 0})
    plan = on_h200(recipe).plan(Budget(60 * GIB, 64 * GIB, LINKS))
    assert plan.setting.executor == "standard"
    assert "backward, experts done" in plan.phases
    assert "backward, dense done" in plan.phases


def test_the_largest_model_fits_and_one_layer_more_does_not(deep):
    planner = deep.with_recipe(deep_recipe(global_batch_size=1))
    budget = Budget(1.2 * GIB, 4.2 * GIB, LINKS)
    found = largest(*place(planner, budget), "fastest")
    assert found is not None
    assert found.shape.num_layers > 2
    assert planner.with_layers(found.shape.num_layers + 1).plan(budget) is None


def test_changes_are_faster_and_cheapest_first(deep, plans):
    tight = plans[1]
    changes = cheapest_changes(deep.recipe, tight.budget, tight, replanned(*place(deep, tight.budget), "fastest"))
    assert 1 <= len(changes) <= 3
    rates = [change.plan.tokens_per_s for change in changes]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] > tight.tokens_per_s


def test_why_names_the_layer_its_cost_and_what_is_missing(deep, plans):
    lines = why(deep, plans[1], 3)
    assert lines[0].startswith("layer 3 is one of")
    assert any("needs" in line for line in lines)
    assert why(deep, plans[-1], 3)[-1].strip() == "no choice is faster"


def test_a_plan_on_a_cpu_uses_no_host_tier():
    planner = Planner(deep_recipe(), 4096, make_machine(8 * GIB), make_rates())
    plan = planner.plan(Budget(8 * GIB, 0, Links(None, None)))
    assert plan.host == {}
    assert {row.choice.states for row in plan.rows} == {"device"}


def test_each_way_of_treating_compiled_layers_costs_its_code():
    budget, machine = Budget(8 * GIB, 0, Links(None, None)), make_machine(8 * GIB, compiler="g++")
    planner = Planner(deep_recipe(), 4096, machine, make_rates())
    setting, num_layers = GlobalConfig.of(planner.recipe), DEEP["num_layers"]

    def process(*kinds):
        layers = tuple(LayerMemory(activations=kinds[i % len(kinds)]) for i in range(num_layers))
        found = planner.priced(setting, MemoryPlan(layers=layers), budget)
        assert found.phase_bytes("forward") == pytest.approx(sum(found.phases["forward"].values()))
        return {owners["process"] for owners in found.phases.values()}

    one = planner.shape(planner.recipe).process_bytes
    for number in (1, 2, 3):
        assert process(*("keep", "attention", "recompute")[:number]) == {one + (number - 1) * KIND_BYTES}
    eager = Planner(deep_recipe(compile="off"), 4096, machine, make_rates())
    assert eager.shape(eager.recipe).kind_bytes == 0


def test_a_setting_that_takes_the_solver_too_long_is_left_out(deep, monkeypatch):
    """And a plan that may be there is not taken for one that is not."""
    budget = Budget(4 * GIB, 64 * GIB, LINKS)
    best = deep.plan(budget)
    assert not [note for note in best.notes if "left out" in note]

    def late_with(*late):
        def solved(problem, **options):
            if problem in late or not late:
                raise OutOfTime("too long")
            return solve(problem, **options)

        monkeypatch.setattr("tilewright.planner.planner.solve", solved)

    tables = []
    monkeypatch.setattr("tilewright.planner.planner.solve", lambda problem, **_: tables.append(problem))
    assert deep.plan(budget) is None
    mine = next(i for i, problem in enumerate(tables) if _is_of(problem, best))
    late_with(tables[mine])
    other = deep.plan(budget)
    assert other.setting != best.setting
    assert other.step_s >= best.step_s
    assert [note for note in other.notes if "1 of the settings" in note]
    late_with()
    with pytest.raises(OutOfTime):
        deep.plan(budget)
    with pytest.raises(OutOfTime):
        deep.smallest(budget)


def _is_of(problem, plan):
    """Whether a solver's problem is that of a plan's setting: its groups price the plan's rows."""
    costs = {(group.name, cost) for group in problem.groups for cost in group.costs}
    return all((row.name, row.cost) in costs for row in plan.rows)


def test_plan_files_are_read_back(tmp_path, plans):
    for plan in plans[:2]:
        path = tmp_path / "plan.toml"
        path.write_text(to_toml(plan))
        assert is_plan_file(path)
        file = read_plan(path)
        file.check(plan.shape)
        assert file.settings == plan.settings()
        assert [file.layers[i] for i in range(16)] == [plan.row_of(i).choice for i in range(16)]


def test_a_plan_file_for_another_model(tmp_path, plans):
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(plans[0]))
    other = on_h200(make_recipe()).shape(make_recipe())
    with pytest.raises(ConfigError, match="for another model") as caught:
        read_plan(path).check(other)
    problem = caught.value.problems[0]
    assert "16 layers" in problem.got
    assert "3 layers" in problem.need
    assert problem.try_


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("format = 3", "format = 9"),
        ('layers = "', 'layers = "0, '),
        ('states = "', 'states = "moon'),
        ("[model]", "[modell]"),
        ("[[layers]]", "[[players]]"),
        ("=", ""),
    ],
)
def test_damaged_plan_files_are_errors_in_four_parts(tmp_path, plans, old, new):
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(plans[1]).replace(old, new, 1))
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_plan(path)
    assert all((p.got and p.need and p.try_ and p.where) for p in caught.value.problems)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "none.toml")


def test_backward_makes_again_what_a_layer_did_not_keep():
    """Beyond what it kept: the gradients' need, which all kinds share, and the rest of what everything would be.
    So it was measured, compiled and eager (docs/log.md, 2026-11-21)."""
    recipe = make_recipe()
    finder = Planner(recipe, 8192, make_machine(64 * GIB), make_rates())
    shape, setting = finder.shape(recipe), GlobalConfig.of(recipe)
    costs = {
        kind: layer_cost(shape.classes[0], LayerMemory(activations=kind), setting, shape, recipe, make_rates(), LINKS)
        for kind in ("keep", "selective", "matmuls", "attention", "recompute")
    }
    lines = {"keep": shape.classes[0].kept, "selective": shape.classes[0].kept_selective}
    lines |= {"matmuls": shape.classes[0].kept_matmuls, "attention": shape.classes[0].kept_attention}
    lines["recompute"] = shape.classes[0].input
    rows = setting.micro_batch_size
    for kind, cost in costs.items():
        again = cost.backward - costs["keep"].backward
        assert again == pytest.approx(lines["keep"](rows) - lines[kind](rows)), kind


def test_compiled_layers_with_experts_keep_nothing_selected_unless_somebody_says_so():
    """Nobody sees into their pieces, so they would be recomputed whole."""
    recipe = make_recipe(model={"num_experts": 4, "num_experts_per_token": 2, "expert_dim": 32, "num_dense_layers": 0})
    planner = Planner(recipe, 512, make_machine(64 * GIB, compiler="g++"), make_rates())
    shape, setting = planner.shape(recipe), GlobalConfig.of(recipe)
    (found,) = shape.classes
    assert shape.compiled

    def kinds(fixed):
        return {choice.activations for choice in choices(found, setting, shape, recipe, LINKS, fixed)}

    assert kinds(Constraints()) == {"keep", "recompute"}
    assert kinds(Constraints(activations=frozenset(["selective"]))) == {"selective"}
    planner = planner.with_fixed(Constraints(activations=frozenset(["selective"])))  # which layer_major cannot do
    budget = Budget(64 * GIB, 64 * GIB, LINKS)
    assert planner.plan(budget).setting.executor == planner.smallest(budget).setting.executor == "standard"
    kinds_of_all = ("keep", "selective", "matmuls", "attention", "recompute")
    seconds = {
        kind: layer_cost(found, LayerMemory(activations=kind), setting, shape, recipe, make_rates(), LINKS).seconds
        for kind in kinds_of_all
    }
    assert seconds["keep"] < seconds["recompute"] <= seconds["selective"] == seconds["attention"]

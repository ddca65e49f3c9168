"""FLOPs and joules of a plan: those of all ranks together, whatever they are cut into."""

from dataclasses import replace

import pytest

from tests.planner.families import FAMILIES, VOCAB
from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tilewright.core.config.change_recipe import changed
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import count_flops
from tilewright.planner.advice.energy import flops_per_token, planned_energy
from tilewright.planner.advice.pipeline_rank_memory import largest_stage
from tilewright.planner.machine.gpu_specs import find_published
from tilewright.planner.planner import Planner


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"dp_shard": 2}])
def test_flops_of_a_token_do_not_depend_on_the_mesh(parallel):
    recipe = make_recipe(parallel=parallel)
    plan = make_plan(recipe, 512, make_machine(), make_rates())
    counted = count_flops(DecoderConfig.from_section(recipe.model, 512), 128)
    matmuls = counted.forward - sum(counted.attention)
    assert flops_per_token(plan) == pytest.approx(3 * matmuls)


@pytest.mark.parametrize("parallel", [{"pp": 3}, {"pp": 3, "tp": 2}, {"pp": 3, "dp_shard": 2}])
def test_stages_have_the_flops_and_the_boards_of_the_whole(parallel):
    """The plan of stages is that of one rank."""
    recipe = make_recipe(parallel=parallel, energy={"assume_watts": 65})
    machine, rates = make_machine(), make_rates()
    whole = make_plan(changed(recipe, {"parallel.pp": 1}), 512, machine, rates)
    planner, budget = Planner(recipe, 512, machine, rates), whole.budget
    plan = largest_stage(recipe, planner, budget)
    assert flops_per_token(plan) == pytest.approx(flops_per_token(whole))
    card = find_published("h100").machine(machine, GIB)
    boards = planned_energy(replace(plan, machine=card), 1).units
    assert boards == 3 * planned_energy(replace(whole, machine=card), 1).units


def test_watts_of_machines_are_the_recipes():
    plan = make_plan(make_recipe(energy={"assume_watts": 65}), 512, make_machine(), make_rates())
    found = planned_energy(plan, 100, machines=2)
    assert found.joules == pytest.approx(2 * 65 * 100 * plan.step_s)
    assert "energy.assume_watts" in found.assumed
    assert planned_energy(make_plan(make_recipe(), 512, make_machine(), make_rates()), 100) is None


@pytest.mark.slow
def test_experts_in_one_tensor_count(tmp_path):
    """Of Mixtral's eight experts a token passes two."""
    from tests.planner.test_trace import recipe_of

    plan = make_plan(recipe_of(FAMILIES["mixtral"], tmp_path), VOCAB, make_machine(), make_rates())
    dim, width, heads = 320, 896, 320
    layer = 4 * dim * heads + 8 * dim + 2 * 3 * dim * width
    assert flops_per_token(plan) == pytest.approx(6 * (3 * layer + dim * VOCAB), rel=0.01)

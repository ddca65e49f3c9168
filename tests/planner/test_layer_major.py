"""The plan of layer-major runs against real slices, tiers and layer inputs."""

import pytest
import torch

from tests.planner.rates import GIB, make_machine, make_plan, make_rates, make_recipe
from tests.planner.test_cost import MACHINE, changes_to_fit, make_batch, plan_of, real_model
from tilewright.core.config.load import load_recipe
from tilewright.core.memory_plan import OFFLOADS
from tilewright.memory.layer_major.passes import LayerMajor
from tilewright.memory.layer_major.replay_random import Replay
from tilewright.memory.offload.activations import ActivationStore
from tilewright.memory.offload.param_store import ParamOffloader
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.models.build import layered
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.ops.kernels import Kernels
from tilewright.optim.adam import DeepSeekAdam

MODEL = {"dim": 128, "num_layers": 5, "num_heads": 2}
LOW = {"moments": "bf16", "master_weights": "stochastic"}
TIERS = [("device", "device"), ("device", "disk"), ("host", "disk"), ("disk", "disk")]


def layer_major_recipe(tied=False, optim=LOW, memory=None, **sections):
    model = MODEL | {"tie_embeddings": tied}
    return make_recipe(
        model=model, optim=optim, memory={"executor": "layer_major"} | (memory or {}),
        precision={"mode": "bf16_mixed"}, **sections,
    )  # fmt: skip


def parts_of(recipe):
    model = real_model(recipe)
    optimizer = DeepSeekAdam(
        model.parameters(), moments=recipe.optim.moments, master=recipe.optim.master_weights, kernels=Kernels(MACHINE)
    )
    view = layered(model)
    return model, optimizer, view, find_layer_groups(model, view, recipe.memory.layers_per_group)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("parameters", "states"), TIERS)
def test_bytes_on_the_device_are_those_of_real_tiers(parameters, states, group, tied, tmp_path):
    memory = {"offload_params": OFFLOADS[parameters], "offload_optimizer": OFFLOADS[states], "layers_per_group": group}
    recipe = layer_major_recipe(tied, memory=memory)
    model, optimizer, _, layer_groups = parts_of(recipe)
    home = ParamOffloader(model, layer_groups, optimizer, "cpu", parameters=parameters, states=states, folder=tmp_path)
    update = plan_of(recipe).tracked["update"]
    for owner, pool in (("parameters", home.parameters), ("optimizer", home.states)):
        found = pool.num_bytes
        measured = found["device"] + found["host"]  # one memory here
        # Buffers are aligned, and norms stay in FP32 where the plan spreads bytes evenly.
        assert update[owner] == pytest.approx(measured, rel=0.03), (owner, update[owner] / measured - 1)
    trained = [sum(p.numel() for p in part.params) for part in layer_groups]
    slices_ = max(trained[1:-1]) + trained[-1]  # a tied matrix' gradient stays
    assert any(update["gradients"] == pytest.approx(4 * busiest, rel=0.01) for busiest in (slices_, 512 * 128))


@pytest.mark.parametrize("inputs", ["exact", "fp8"])
@pytest.mark.parametrize("group", [1, 2])
def test_layer_inputs_are_those_of_a_real_forward_pass(inputs, group):
    train = {"micro_batch_size": 2, "global_batch_size": 6, "checkpoint_inputs": inputs}
    recipe = layer_major_recipe(memory={"layers_per_group": group}, train=train)
    model, optimizer, view, layer_groups = parts_of(recipe)
    store, memory_tracker = ActivationStore("device", "cpu", inputs, kernels=Kernels(MACHINE)), MemoryTracker("cpu")
    run = LayerMajor(
        view, layer_groups, inputs=store, offloader=ParamOffloader(model, layer_groups, optimizer, "cpu"),
        replay=Replay("cpu"), phase=memory_tracker.phase, device=torch.device("cpu"),
        retry=lambda piece, on_oom: piece(),
    )  # fmt: skip
    run.forward([make_batch(recipe)] * 3)
    forward = plan_of(recipe).tracked["forward"]
    assert forward["activations"] == store.num_bytes["device"]


def test_forty_two_billion_parameters_fit_on_one_card_only_this_way():
    recipe = load_recipe("slice_42b_h200", {}, environ={}).recipe
    machine = make_machine(139 * GIB, "cuda")
    plan = make_plan(recipe, 128_256, machine, make_rates())
    assert plan.shape.num_parameters > 42e9
    assert plan.state == "fits"
    assert plan.peak_bytes < 130 * GIB
    assert any("guessed" in note for note in plan.notes)
    standard = recipe.model_copy(update={"memory": recipe.memory.model_copy(update={"executor": "standard"})})
    assert make_plan(standard, 128_256, machine, make_rates()).state != "fits"


def test_what_would_make_it_fit_keeps_the_executor_and_offers_the_disk():
    plan = plan_of(layer_major_recipe())
    tight = layer_major_recipe(plan={"device_memory": int(plan.peak_bytes) - 2**20, "margin": 0})
    assert plan_of(tight).state != "fits"
    settings = {name for fix in changes_to_fit(tight) for name in fix.settings}
    assert "train.activation_checkpoint" not in settings
    assert any(name.startswith("memory.") for name in settings)

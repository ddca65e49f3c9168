"""Real steps under plans that change: losses and weights are those of a run in which nothing changed, bit by bit.

The planner is played (`test_regroup`), and what the run may use is said; executors, models and failures are real.
"""

import random

import pytest
import torch

from tests.models.shapes import make_batch, make_decoder
from tests.training.out_of_memory import Allocator
from tests.training.test_placement import layer_major
from tests.training.test_regroup import PlayedPlanner, PlayedTracker, looked_at
from tilewright.core.memory_plan import LayerMemory, MemoryPlan
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.training.executor.activation_policy import ActivationPolicy
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.hooks.adaptive_replanner import AdaptiveReplanner

LR = 1e-3
NUM_LAYERS = 2
KINDS = {
    "standard": [LayerMemory(activations=kind) for kind in ("keep", "selective", "attention", "recompute")],
    "layer_major": [
        LayerMemory(activations="keep"),
        LayerMemory(activations="recompute"),
        LayerMemory(activations="recompute", inputs="disk", states="host", parameters="disk"),
    ],
}
LENGTHS = (512, 512, 2048, 512, 512)


def make(which, folder, shape="gqa"):
    model = make_decoder(shape).train()
    memory_plan = MemoryPlan(layers=(KINDS[which][0],) * NUM_LAYERS)
    if which == "layer_major":
        return layer_major(model, memory_plan, folder)
    optimizer, policy = DeepSeekAdam(decay_groups(model, 0.1)), ActivationPolicy(model, memory_plan)
    return StandardExecutor(model, optimizer, clip=GradClip(0.5), policy=policy)


def batches(lengths=LENGTHS):
    return [[make_batch(1, length, seed=2 * step + micro) for micro in range(2)] for step, length in enumerate(lengths)]


def weights_of(executor):
    """Every parameter and state, wherever it is stored."""
    if isinstance(executor, StandardExecutor):
        return [value.clone() for value in executor.model.state_dict().values()]
    layer_groups, home = executor.run.layer_groups, executor.run.offloader
    found = []
    for part in layer_groups:
        home.fetch(part, states=True)
        found += [param.detach().clone() for param in part.params]
        found += [value.clone() for p in part.trained for value in executor.optimizer.state[p].values()]
        home.release(part, changed=False)
    return found


class Run:
    """Steps of an executor that is watched; `budget` may be changed between them."""

    def __init__(self, which, folder, budget, shape="gqa"):
        self.executor, self.budget, self.events, self.seen = make(which, folder, shape), budget, [], []
        planner = PlayedPlanner(NUM_LAYERS, KINDS[which])

        def peaks():  # as expected
            return {"backward": int(planner.predict(self.executor.memory_plan, self.length).step_bytes)}

        self.length = 512
        self.replanner = AdaptiveReplanner(
            self.executor, lambda: planner, PlayedTracker(peaks), lambda: self.budget,
            lambda step, text, **numbers: self.events.append(numbers["trigger"]),
        )  # fmt: skip

    def step(self, number, microbatches):
        self.length = microbatches[0]["input_ids"].shape[1]
        result = looked_at(self.replanner, number, microbatches, LR)
        self.seen.append(self.executor.memory_plan)
        return result.loss, result.grad_norm


def plain(which, folder, made, shape="gqa"):
    executor = make(which, folder, shape)
    results = [executor.step(microbatches, LR) for microbatches in made]
    return [(result.loss, result.grad_norm) for result in results], weights_of(executor)


def assert_equal(run, results, expected):
    losses, weights = expected
    assert results == losses
    for found, wanted in zip(weights_of(run.executor), weights, strict=True):
        assert torch.equal(found, wanted), (found - wanted).abs().max()


@pytest.mark.parametrize("which", ["standard", pytest.param("layer_major", marks=pytest.mark.slow)])
def test_rows_of_512_of_2048_and_of_512_again(which, tmp_path):
    made = batches()
    run = Run(which, tmp_path, budget=420.0)
    results = [run.step(number, microbatches) for number, microbatches in enumerate(made, 1)]
    assert run.events == ["calibration", "shape", "shape"]
    assert run.seen[0] == run.seen[1] == run.seen[3] != run.seen[2]
    assert_equal(run, results, plain(which, tmp_path, made))


@pytest.mark.parametrize("which", [pytest.param("standard", marks=pytest.mark.slow), "layer_major"])
def test_a_budget_that_is_cut_by_30_percent_in_mid_run(which, tmp_path):
    made = batches((512,) * 5)
    run = Run(which, tmp_path, budget=420.0)
    results = []
    for number, microbatches in enumerate(made, 1):
        run.budget = 420.0 * (0.7 if number == 3 else 1.0)
        results.append(run.step(number, microbatches))
    assert run.events == ["calibration", "budget", "budget"]
    assert run.seen[2] != run.seen[1] == run.seen[3]
    assert_equal(run, results, plain(which, tmp_path, made))


@pytest.mark.parametrize("runs", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", KINDS)
def test_no_memory_at_an_allocation_drawn_at_random(which, runs, tmp_path):
    """In every step after the first, in the second twice: the run comes to the same end, and says what it did."""
    made = batches((32,) * 5)
    expected = plain(which, tmp_path, made, "gqa_moe")
    executor = make(which, tmp_path, "gqa_moe")
    with Allocator() as allocator:
        executor.step(made[0], LR)
    draw = random.Random(which)
    for _ in range(runs):
        run = Run(which, tmp_path, 1e6, "gqa_moe")
        results = [run.step(1, made[0])]
        for number, microbatches in enumerate(made[1:], 2):
            places = draw.sample(range(allocator.count), 2 if number == 2 else 1)
            with Allocator(places):
                results.append(run.step(number, microbatches))
        assert "out_of_memory" in run.events
        assert_equal(run, results, expected)

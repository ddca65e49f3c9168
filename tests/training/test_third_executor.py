"""A run takes an executor that the package does not know, with what it can do, and nothing else is changed for it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.training.tiny import assert_same_run, rows, tiny
from tilewright.core.config.executors import capabilities_of
from tilewright.core.errors import ConfigError
from tilewright.core.memory_plan import MemoryPlan
from tilewright.data.batches.microbatches import Batch, count_targets, count_tokens, to_device
from tilewright.training.executor.base import ExecutorInputs, ExecutorKind, StepResult, TensorAccess
from tilewright.training.executor.step_transaction import StepTransaction
from tilewright.training.session import train


class Plain:
    """Autograd, clipping, update: nothing of the package's executors, and a state of its own."""

    def __init__(self, inputs: ExecutorInputs) -> None:
        self.model, self.optimizer, self.clip = inputs.model, inputs.optimizer, inputs.clip
        self.params = [param for group in inputs.optimizer.param_groups for param in group["params"]]
        self.device = inputs.memory_tracker.device
        self.transaction = StepTransaction(inputs.model, self.params, self.device, [inputs.clip])
        self.access, self.weights = TensorAccess(), None
        self.memory_plan: MemoryPlan = inputs.plan_of(len(inputs.model.layers))
        self.steps, self.closed = 0, False

    def apply_memory_plan(self, memory_plan: MemoryPlan) -> None:
        raise ConfigError("Plans do not change", got="another plan", need="the first one", try_='memory.plan = ""')

    def step(self, microbatches: Sequence[Batch], lr: float) -> StepResult:
        targets, loss_sum = count_targets(microbatches), torch.zeros((), dtype=torch.float64)
        for batch in microbatches:
            loss = self.model.loss(to_device(batch, self.device)).loss_sum
            (loss * (1.0 / targets)).backward()
            loss_sum += loss.detach()
        norm = self.clip(self.params, 1.0).norm
        assert math.isfinite(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.model.after_step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        tokens = count_tokens(microbatches)
        return StepResult(float(loss_sum) / targets, targets, tokens, norm, None, 1.0, 0.01)

    def stateful(self):
        return {"clip": self.clip, "plain": self}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def close(self) -> None:
        self.closed = True


class Kind:
    """Makes plain executors, and keeps them."""

    def __init__(self, **changes: bool) -> None:
        self.made: list[Plain] = []
        self.kind = ExecutorKind(replace(capabilities_of("standard"), **changes), self.make)

    def make(self, inputs: ExecutorInputs) -> Plain:
        self.made.append(Plain(inputs))
        return self.made[-1]


SETTINGS = {"precision__mode": "fp32", "memory__plan": ""}


def test_a_third_executor_trains_the_losses_of_the_standard_one(data, tmp_path):
    standard = train(tiny(data, tmp_path, run__name="standard", **SETTINGS)).run_dir
    third = Kind()
    run = train(tiny(data, tmp_path, run__name="third", **SETTINGS), executor=third.kind).run_dir
    losses = [[row["loss"] for row in rows(folder / "metrics.jsonl") if "loss" in row] for folder in (run, standard)]
    assert len(losses[0]) > 5
    assert losses[0] == losses[1]
    assert [one.closed for one in third.made] == [True]


@pytest.mark.slow
def test_its_state_is_in_the_checkpoint(data, tmp_path):
    whole, halves = Kind(), Kind()
    train(tiny(data, tmp_path, run__name="whole", **SETTINGS), executor=whole.kind)
    train(tiny(data, tmp_path, run__name="halves", train__steps=3, optim__schedule="constant", **SETTINGS),
          executor=halves.kind)  # fmt: skip
    assert halves.made[0].steps == 3
    run = train(tiny(data, tmp_path, run__name="halves", optim__schedule="constant", **SETTINGS), executor=halves.kind)
    assert run.step == 6
    assert halves.made[1].steps == 6, "three of the checkpoint, and three"
    again = train(tiny(data, tmp_path, run__name="again", optim__schedule="constant", **SETTINGS), executor=Kind().kind)
    assert_same_run(run.run_dir, again.run_dir)


@pytest.mark.parametrize(
    ("lacks", "settings", "words"),
    [
        ("activation_checkpoint", {"train__activation_checkpoint": "full"}, "Activation checkpointing"),
        ("adapters", {"lora__rank": 4}, "LoRA"),
        ("whole_gradient", {"precision__mode": "fp8_tile", "precision__controller__enabled": "true"}, "FP8 switching"),
        ("shard", {"parallel__dp_shard": 2}, "does not shard"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_prepared(data, tmp_path, lacks, settings, words):
    third = Kind(**{lacks: False})
    with pytest.raises(ConfigError, match=words):
        train(tiny(data, tmp_path, **SETTINGS | settings), executor=third.kind)
    assert not third.made

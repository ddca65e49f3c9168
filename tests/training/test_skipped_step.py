"""A skipped step leaves nothing behind: buffers, notes and clipping are as before, whatever the reason and executor.

The reference is a run that never saw the bad step.
"""

import copy

import pytest
import torch
from torch import nn

from tests.models.shapes import make_batch, make_decoder
from tests.training.test_layer_major_step import steps
from tilewright.core.errors import NumericsError
from tilewright.models.base.protocols import LossOutput
from tilewright.models.layerwise.layer_view import find_layer_groups
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.optim.param_groups import decay_groups
from tilewright.precision.controller.controller_settings import ControllerSettings
from tilewright.precision.controller.precision_controller import PrecisionController
from tilewright.precision.convert import convert
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.policy.policy import Policy
from tilewright.training.executor.layer_major import LayerMajorExecutor
from tilewright.training.executor.standard import StandardExecutor


class Counting(nn.Module):
    """Buffers of every kind that a forward pass changes: in place, assigned, made from None, and notes too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", None)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.noted: torch.Tensor | None = None

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        self.last = x.detach()[0].clone()
        self.hidden.add_(x.detach().mean())
        self.noted = x.detach().sum()
        return x


class Net(nn.Module):
    """`poison` multiplies the input, `spoil` the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(5, 4),
            nn.BatchNorm1d(4),
            Counting(),
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            nn.BatchNorm1d(4, momentum=None),
        )
        self.head = nn.Linear(4, 3)
        self.poison, self.spoil = 1.0, 1.0

    def loss(self, batch):
        logits = self.head(self.body(batch["x"] * self.poison))
        total = nn.functional.cross_entropy(logits, batch["labels"], ignore_index=-100, reduction="sum")
        return LossOutput(total * self.spoil, (batch["labels"] != -100).sum())

    def after_step(self):
        pass


def micro_batches(seed, count=2):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(6, 5, generator=generator), "labels": torch.randint(0, 3, (6,), generator=generator)}
        for _ in range(count)
    ]


def held(model):
    """All that a forward pass may change, by name."""
    found = dict(model.state_dict())
    for name, module in model.named_modules():
        found |= {f"{name}.{key}": value for key, value in module._buffers.items() if value is not None}
        found |= {f"{name}.{key}": value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
    return {name: value.clone() for name, value in found.items()}


def assert_same(got, want):
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name} is {got[name]}, not {value}"


class Bad:
    """Ways to a skipped step; each is a context in which the next one is skipped."""

    @staticmethod
    def overflow(executor, batches):
        executor.model.poison = float("inf")
        return batches

    @staticmethod
    def loss_alone(executor, batches):
        """The gradient is finite (zero), the loss is not."""
        executor.model.poison, executor.model.spoil = 1.0, 1.0
        real = executor.model.loss

        def loss(batch):
            output = real(batch)
            return LossOutput(output.loss_sum + float("inf"), output.count)

        executor.model.loss = loss
        return batches

    @staticmethod
    def threshold(executor, batches):
        executor.clip.threshold = 1e-6
        return batches

    @staticmethod
    def no_targets(executor, batches):
        return [{**batch, "labels": torch.full_like(batch["labels"], -100)} for batch in batches]


def recover(executor):
    executor.model.poison, executor.model.spoil, executor.clip.threshold = 1.0, 1.0, 1e5
    vars(executor.model).pop("loss", None)


REASONS = {
    "overflow": (Bad.overflow, True),
    "not_finite": (Bad.overflow, False),
    "loss_alone": (Bad.loss_alone, True),
    "threshold": (Bad.threshold, False),
    "threshold_scaled": (Bad.threshold, True),
    "no_targets": (Bad.no_targets, False),
}


def executor_of(scaled):
    model = Net()
    optimizer = DeepSeekAdam(model.parameters(), lr=0.1)
    scaler = DynamicScaler(1024.0, window=1000) if scaled else None
    return StandardExecutor(model, optimizer, clip=GradClip(1.0, adaptive=1.5, momentum=2), scaler=scaler)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("first", [True, False], ids=["first_step", "later_step"])
def test_a_skipped_step_leaves_nothing_behind(reason, first):
    make_bad, scaled = REASONS[reason]
    with_bad, without = executor_of(scaled), executor_of(scaled)
    for executor in (with_bad, without):
        for seed in range(0 if first else 3):
            executor.step(micro_batches(seed), 0.1)
    before, clip = held(with_bad.model), with_bad.clip.state_dict()
    result = with_bad.step(make_bad(with_bad, micro_batches(99)), 0.1)
    assert result.skipped is not None
    assert_same(held(with_bad.model), before)
    assert with_bad.clip.state_dict() == clip
    recover(with_bad)
    for seed in range(10, 12):
        results = [executor.step(micro_batches(seed), 0.1) for executor in (with_bad, without)]
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
        assert results[0].skipped is results[1].skipped is None
    for name, value in held(without.model).items():
        torch.testing.assert_close(held(with_bad.model)[name], value, msg=lambda m, name=name: f"{name}: {m}")


def test_the_last_of_several_bad_steps_leaves_nothing_behind_either():
    """The run stops, and what it saves is good."""
    executor = executor_of(False)
    before = held(executor.model)
    executor.model.poison = float("nan")
    for _ in range(2):
        executor.step(micro_batches(0), 0.1)
    with pytest.raises(NumericsError, match="3 steps in a row"):
        executor.step(micro_batches(0), 0.1)
    assert_same(held(executor.model), before)


@pytest.mark.parametrize("delayed", [False, True], ids=["exact", "delayed"])
def test_layer_major_leaves_nothing_behind(delayed):
    """A mixture of experts notes how many tokens each expert got; a skipped step's are not counted."""
    model = make_decoder("deepseek").train()
    layer_groups = find_layer_groups(model, model, 1)
    clip = GradClip(1.0)
    executor = LayerMajorExecutor(
        model, model, layer_groups, DeepSeekAdam(decay_groups(model, 0.1)), clip=clip, delayed=delayed
    )
    batches = steps(1)[0][:2]
    executor.step(batches, 1e-3)
    before = held(model)
    with torch.no_grad():
        norm = model.model.norm.weight.clone()
        model.model.norm.weight[0] = float("nan")
    result = executor.step(batches, 1e-3)
    assert result.skipped is not None
    with torch.no_grad():
        model.model.norm.weight.copy_(norm)
    assert_same(held(model), before)
    assert model._load_LE is None


def test_standard_leaves_no_load_of_experts_behind():
    model = make_decoder("deepseek").train()
    executor = StandardExecutor(model, DeepSeekAdam(model.parameters()), clip=GradClip(1.0, threshold=1e-9))
    batch = make_batch(seed=1)
    before = copy.deepcopy(model.state_dict())
    assert executor.step([batch, make_batch(seed=2)], 1e-3).skipped
    assert model._load_LE is None
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("active", [False, True], ids=["schedule_only", "on_evidence"])
def test_a_plain_loop_with_a_controller(active):
    """`PrecisionController.run`: where its outcome is not to be applied, the statistics are as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Linear(128, 128))
    convert(model, Policy("fp8_tile", keep="value"))
    with PrecisionController(model, ControllerSettings(budget=0.5) if active else None) as control:
        x = torch.randn(32, 128)
        assert control.run(lambda: model(x).square().mean()).apply
        before = held(model)
        outcome = control.run(lambda: model(x * float("inf")).square().mean())
        assert outcome.apply is not active  # without evidence it judges nothing
        if active:
            assert_same({k: v for k, v in held(model).items() if "running" in k or "tracked" in k},
                        {k: v for k, v in before.items() if "running" in k or "tracked" in k})  # fmt: skip

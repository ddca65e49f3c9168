"""Converted models under accelerate: the losses of a plain loop, loss scaling, accumulation, refusals."""

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import tilewright
from tilewright.core.errors import ConfigError
from tilewright.integrations.accelerate import convert_for
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.precision.policy.policy import Policy, Rule

FP16 = Policy("fp32", (Rule(op="linear", compute="fp16"),))


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """accelerate keeps its settings for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)) for _ in range(8)]


def plain_losses(model: nn.Module, every: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for index, (x, labels) in enumerate(data()):
        loss = nn.functional.cross_entropy(model(x), labels)
        (loss / every).backward()
        losses.append(loss.item())
        if (index + 1) % every == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def accelerated_losses(policy, every: int = 1, scaler: DynamicScaler | None = None) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=every)
    model = net()
    convert_for(accelerator, model, policy, scaler=scaler)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for x, labels in data():
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("policy", ["bf16_mixed", FP16], ids=["bf16", "fp16"])
def test_accelerate_equals_a_plain_loop(policy, every):
    """The loss scale is a power of two, so scaling and unscaling change no bit unless something underflows."""
    want = plain_losses(tilewright.convert(net(), policy), every)
    assert accelerated_losses(policy, every) == pytest.approx(want, rel=2e-3)
    assert want == pytest.approx(plain_losses(net(), every), rel=2e-2)


def test_an_overflow_skips_the_step():
    scaler = DynamicScaler(2.0**24)
    losses = accelerated_losses(FP16, scaler=scaler)
    assert scaler.skipped > 0
    assert scaler.scale_value == 2.0 ** (24 - scaler.skipped)
    first = nn.functional.cross_entropy(tilewright.convert(net(), FP16)(data()[0][0]), data()[0][1]).item()
    assert losses[0] == first


def test_a_skipped_step_leaves_no_statistics_behind():
    """Over two accumulated batches, the second one infinite; then the first two good ones."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
    convert_for(accelerator, model, FP16, scaler=DynamicScaler(16.0))
    reference = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batches = [x for x, _ in data()[:3]]
    for x in (batches[0], batches[1] * torch.inf, batches[1], batches[2]):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    for x in batches[1:]:
        reference(x)
    for name, value in reference.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], value)


def test_refusals():
    with pytest.raises(ConfigError, match="Mixed precision of accelerate is on"):
        convert_for(Accelerator(cpu=True, mixed_precision="bf16"), net(), "bf16_mixed")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    with pytest.raises(ConfigError, match="Model or optimizer was already prepared by accelerate"):
        convert_for(accelerator, model, "bf16_mixed")

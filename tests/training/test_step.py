"""The standard executor: the gradient of the whole batch whatever the micro-batches, and bad steps change nothing."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tilewright.core.errors import NumericsError
from tilewright.data.batches.microbatches import count_targets
from tilewright.models.base.protocols import LossOutput
from tilewright.optim.adam import DeepSeekAdam
from tilewright.optim.clip import GradClip
from tilewright.precision.loss_scaling.loss_scale import DynamicScaler
from tilewright.training.executor.standard import StandardExecutor
from tilewright.training.executor.step_transaction import all_finite


class Toy(nn.Module):
    """Embedding, two linears, cross-entropy summed over targets. `poison` multiplies the loss."""

    def __init__(self, vocab: int = 13, dim: int = 8, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, dim, dtype=dtype)
        self.mid = nn.Linear(dim, dim, dtype=dtype)
        self.head = nn.Linear(dim, vocab, dtype=dtype)
        self.poison = 1.0
        self.updates = 0

    def loss(self, batch):
        logits = self.head(torch.tanh(self.mid(self.embed(batch["input_ids"]))))
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return LossOutput(total * self.poison, (batch["labels"] != -100).sum())

    def after_step(self, group=None):
        self.updates += 1


def _rows(num: int, seed: int, ignored: float = 0.4):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (num, 6), generator=generator)
    labels = torch.randint(0, 13, (num, 6), generator=generator)
    labels[torch.rand(num, 6, generator=generator) < ignored] = -100
    return {"input_ids": ids, "labels": labels}


def _split(batch, sizes):
    parts = [torch.split(tensor, sizes) for tensor in batch.values()]
    return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]


def _executor(model, *, clip=None, scaler=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return StandardExecutor(model, optimizer, clip=clip or GradClip(0.0), scaler=scaler, **options)


def _grad_of(executor, microbatches):
    """The gradient as the optimizer sees it."""
    seen = {}
    real = executor.optimizer.step
    executor.optimizer.step = lambda: seen.update({n: p.grad.clone() for n, p in executor.model.named_parameters()})
    result = executor.step(microbatches, 0.0)
    executor.optimizer.step = real
    return seen, result


@pytest.mark.parametrize("sizes", [[7], [1, 6], [3, 1, 2, 1], [1] * 7])
@pytest.mark.support("accumulation", "one")
def test_uneven_microbatches_give_the_gradient_of_the_whole_batch(sizes):
    model = Toy(dtype=torch.float64)
    batch = _rows(7, seed=1)
    batch["labels"][0] = -100  # a micro-batch without a single target, in the last case
    reference = copy.deepcopy(model)
    logits = reference.head(torch.tanh(reference.mid(reference.embed(batch["input_ids"]))))
    mean = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    mean.backward()
    seen, result = _grad_of(_executor(model), _split(batch, sizes))
    assert result.num_targets == count_targets([batch])
    assert result.loss == pytest.approx(mean.item(), abs=1e-12)
    for name, param in reference.named_parameters():
        worst = (seen[name] - param.grad).abs().max().item()
        assert worst < 1e-14, f"{name} is off by {worst}"


@pytest.mark.support("fp16", "one")
def test_loss_scaling_changes_neither_gradient_nor_reported_loss():
    batch = _split(_rows(6, seed=2), [2, 4])
    plain, plain_result = _grad_of(_executor(Toy()), batch)
    scaled, result = _grad_of(_executor(Toy(), scaler=DynamicScaler(init_scale=1024.0)), batch)
    assert result.loss_scale == 1024.0
    assert result.loss == plain_result.loss
    assert result.grad_norm == plain_result.grad_norm
    for name, grad in plain.items():
        assert torch.equal(grad, scaled[name]), name  # a power of two moves only exponents


@pytest.mark.support("decoder", "one")
def test_ten_steps_equal_a_plain_loop():
    model, plain = Toy(), Toy()
    executor = StandardExecutor(model, DeepSeekAdam(model.parameters(), lr=1.0), clip=GradClip(0.5))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(10):
        rate = 0.01 / (1 + step)
        batch = _rows(4, seed=step)
        result = executor.step([batch], rate)
        optimizer.param_groups[0]["lr"] = rate
        output = plain.loss(batch)
        loss = output.loss_sum / output.count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result.skipped is None
        assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert model.updates == 10
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_overflow_changes_nothing_but_the_scale():
    model = Toy()
    executor = _executor(model, scaler=DynamicScaler(init_scale=4.0))
    before = copy.deepcopy(model.state_dict())
    model.poison = float("inf")
    result = executor.step([_rows(4, seed=3)], 0.1)
    assert result.skipped == "overflow"
    assert result.loss_scale == 4.0
    assert executor.scaler.inv_scale == 0.5
    assert model.updates == 0
    assert all(param.grad is None for param in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    model.poison = 1.0
    result = executor.step([_rows(4, seed=3)], 0.1)
    assert result.skipped is None
    assert result.loss_scale == 2.0


def test_norm_above_the_threshold_is_skipped_with_its_reason():
    model = Toy()
    result = _executor(model, clip=GradClip(1.0, threshold=1e-3)).step([_rows(4, seed=4)], 0.1)
    assert "clip_threshold" in result.skipped
    assert model.updates == 0


def test_a_batch_without_targets_is_skipped():
    batch = _rows(2, seed=5)
    batch["labels"][:] = -100
    model = Toy()
    result = _executor(model).step([batch], 0.1)
    assert result.skipped == "the batch holds no targets"
    assert result.num_targets == 0
    assert model.updates == 0


def test_third_bad_step_in_a_row_stops_and_names_the_module():
    model = Toy()
    executor = _executor(model)
    before = copy.deepcopy(model.state_dict())
    good, bad = 1.0, float("nan")
    for poison in (bad, bad, good, bad, bad):
        model.poison = poison
        result = executor.step([_rows(2, seed=6)], 0.0)
        assert (result.skipped is None) == (poison == good)
    with pytest.raises(NumericsError, match="3 steps in a row") as caught:
        executor.step([_rows(2, seed=6)], 0.0)
    problem = caught.value.problems[0]
    assert "first in backward order: head (head.bias)" in problem.got
    assert "5 of 5 gradients" in problem.got
    assert problem.need
    assert problem.try_
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all_finite(model.named_parameters())


def test_bad_weights_are_named():
    model = Toy()
    with torch.no_grad():
        model.mid.weight[0, 0] = float("inf")
    assert not all_finite(model.named_parameters())
    executor = _executor(model)
    for _ in range(2):
        executor.step([_rows(2, seed=6)], 0.0)
    with pytest.raises(NumericsError) as caught:
        executor.step([_rows(2, seed=6)], 0.0)
    assert "1 parameters are not finite themselves, the first is mid.weight" in caught.value.problems[0].got


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_16_bit_weights_are_kept_in_fp32(dtype):
    """A norm above FP16's largest number, before unscaling, is no overflow; sums over micro-batches are FP32."""
    model = Toy().to(dtype)
    executor = _executor(model, scaler=DynamicScaler(init_scale=2.0**18))
    seen, result = _grad_of(executor, _split(_rows(8, seed=9), [3, 5]))
    assert result.skipped is None
    assert {grad.dtype for grad in seen.values()} == {torch.float32}
    reference, _ = _grad_of(_executor(Toy().to(dtype).float()), [_rows(8, seed=9)])
    norm = torch.stack([grad.norm() for grad in reference.values()]).norm().item()
    assert norm * 2.0**18 > torch.finfo(torch.float16).max
    assert result.grad_norm == pytest.approx(norm, rel=0.02)


def test_padding_is_no_token():
    batch = _rows(2, seed=7)
    batch["segments"] = torch.zeros(2, 6, dtype=torch.int32)
    batch["segments"][1, 4:] = -1
    assert _executor(Toy()).step([batch], 0.1).num_tokens == 10


class Telling(nn.Module):
    """Tells the mean of its labels; of a micro-batch without targets what 0 / 0 is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def loss(self, batch):
        is_target = batch["labels"] != -100
        return LossOutput(self.weight.sum(), is_target.sum(), {"label": batch["labels"][is_target].float().mean()})

    def after_step(self, group=None):
        pass


@st.composite
def labelled(draw, most: int = 5):
    """Micro-batches of one step, some without targets: labels by micro-batch."""
    target = st.one_of(st.integers(0, 60), st.just(-100))
    row = st.lists(target, min_size=1, max_size=6)
    return draw(st.lists(row, min_size=1, max_size=most))


def told(steps):
    return [{"input_ids": torch.zeros(1, len(row), dtype=torch.int64), "labels": torch.tensor([row])} for row in steps]


@given(labelled())
def test_what_the_model_tells_is_the_mean_over_targets_whatever_the_micro_batches(steps):
    """FP32 means of small integers, weighed in FP64: one rounding a micro-batch."""
    model = Telling()
    executor = StandardExecutor(model, torch.optim.SGD(model.parameters(), lr=0.1), clip=GradClip(0.0))
    targets = [label for row in steps for label in row if label != -100]
    aux = executor.step(told(steps), lr=0.1).aux
    assert aux == ({"label": pytest.approx(sum(targets) / len(targets), rel=2**-23)} if targets else {})

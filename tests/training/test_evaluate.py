"""Held-out loss: weighted by targets, in FP32 where asked, and without a trace in the model."""

import copy
import math

import pytest
import torch

from tests.training.test_step import Toy, _rows
from tilewright.precision.convert import convert
from tilewright.training.executor.evaluate import DomainLoss, evaluate, joined, pooled


class Noisy(Toy):
    def loss(self, batch):
        output = super().loss(batch)
        noise = torch.rand(()) if self.training else 0.0
        return type(output)(output.loss_sum + noise, output.count)


def _by_hand(model, batches):
    logits = [model.head(torch.tanh(model.mid(model.embed(batch["input_ids"])))).double() for batch in batches]
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    return torch.nn.functional.cross_entropy(torch.cat([x.flatten(0, 1) for x in logits]), labels).item()


@pytest.mark.support("evaluation", "one")
def test_uneven_batches_are_weighted_by_targets():
    model = Toy()
    batches = {"a": [_rows(1, seed=1), _rows(5, seed=2, ignored=0.1)], "b": [_rows(3, seed=3)]}
    results = evaluate(model, batches, fp32=False)
    for domain, rows in batches.items():
        assert results[domain].loss == pytest.approx(_by_hand(model, rows), abs=1e-6)
        assert results[domain].ppl == pytest.approx(math.exp(results[domain].loss))
        assert results[domain].tokens == sum(int((row["labels"] != -100).sum()) for row in rows)
    assert pooled(results).loss == pytest.approx(_by_hand(model, [*batches["a"], *batches["b"]]), abs=1e-6)


def test_bits_per_byte_are_the_losses_over_the_bytes():
    model = Toy()
    batches = {"a": [_rows(2, seed=1)], "b": [_rows(3, seed=3)]}
    plain = evaluate(model, batches, fp32=False)
    results = evaluate(model, batches, num_bytes={"a": 100, "b": 50}, fp32=False)
    for domain, size in (("a", 100), ("b", 50)):
        nats = plain[domain].loss * plain[domain].tokens
        assert results[domain].bits_per_byte == pytest.approx(nats / math.log(2) / size)
        assert results[domain].to_json()["bytes"] == size
    nats = sum(result.loss * result.tokens for result in plain.values())
    assert pooled(results).bits_per_byte == pytest.approx(nats / math.log(2) / 150)
    assert pooled(plain).bits_per_byte is None
    assert "bytes" not in plain["a"].to_json()


def test_a_converted_model_is_evaluated_in_fp32_and_comes_back():
    model, plain = Toy(), Toy()
    convert(model, "bf16_mixed")
    batches = {"a": [_rows(4, seed=4)]}
    assert evaluate(model, batches, fp32=True) == evaluate(plain, batches, fp32=False)
    assert evaluate(model, batches, fp32=False) != evaluate(plain, batches, fp32=False)
    assert "bfloat16" in repr(model.mid)


def test_mode_weights_gradients_and_generators_are_left_alone():
    model = Noisy()
    convert(model, "bf16_mixed")
    model.train()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    evaluate(model, {"a": [_rows(4, seed=5)]}, fp32=True)
    assert model.training
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(param.grad is None for param in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_domains_without_targets_are_left_out():
    empty = _rows(2, seed=6)
    empty["labels"][:] = -100
    assert evaluate(Toy(), {"a": [empty], "b": []}, fp32=False) == {}
    assert pooled({}) is None
    assert DomainLoss(1.0, math.e, 3).to_json() == {"loss": 1.0, "ppl": math.e, "tokens": 3}


@pytest.mark.parametrize("cut", [(1, 2), (3, 1), (2, 0), (0, 0)])
def test_parts_of_a_text_are_the_text(cut):
    """Where a domain has nothing in one of the parts, or in both, too."""
    batches = {"a": [_rows(n, seed=n, ignored=0.1) for n in (1, 5, 2)], "b": [_rows(3, seed=7), _rows(1, seed=8)]}
    sizes = {"a": {3: 70, 1: 10, 2: 50, 0: 0}, "b": {2: 40, 1: 25, 0: 0}}
    first = {domain: rows[:n] for n, (domain, rows) in zip(cut, batches.items(), strict=True)}
    rest = {domain: rows[len(first[domain]) :] for domain, rows in batches.items()}
    found = []
    for part in (first, rest):
        taken = {d: sizes[d][len(first[d])] for d in part}
        left = {d: sizes[d][len(batches[d])] - taken[d] for d in part}
        found.append(evaluate(Toy(), part, num_bytes=taken if part is first else left, fp32=False))
    whole = evaluate(Toy(), batches, num_bytes={"a": 70, "b": 40}, fp32=False)
    both = joined(*found)
    assert set(both) == set(whole)
    for domain, result in whole.items():
        assert (both[domain].tokens, both[domain].bytes) == (result.tokens, result.bytes)
        assert both[domain].loss == pytest.approx(result.loss, rel=1e-14)  # sums of three FP64 terms in another order

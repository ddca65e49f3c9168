"""A teacher's likeliest tokens: bytes that come back, and the loss against plain PyTorch in FP64, for drawn cases.
Tokens that are drawn have `test_sampled`."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tilewright.models.distill.divergences import Teaching, divergences
from tilewright.models.distill.kept_loss import kept_loss
from tilewright.models.distill.kept_tokens import bytes_per_position, decode, encode, keeping
from tilewright.models.distill.top_k import top_k_of

OF_GROUPS = ("reverse_kl", "jensen_shannon")


def drawn(rows, vocab_size, scale=3.0):
    return (scale * torch.randn(rows, vocab_size)).log_softmax(-1)


@pytest.mark.parametrize("vocab_size", [33, 300, 65_536, 65_537, 150_000])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_what_is_kept_comes_back(vocab_size, scale):
    """Tokens exactly; probabilities to half a step of 2^-11 nats, and a sum that is theirs to as much."""
    top_k = min(32, vocab_size - 1)
    log_CV = drawn(6, vocab_size, scale)
    ids_CK, log_CG = top_k_of(log_CV, top_k)
    kept = encode(ids_CK, log_CG, vocab_size)
    assert kept.shape == (6, bytes_per_position(top_k, vocab_size))
    assert kept.shape[1] <= 200
    ids, logs = decode(np.ascontiguousarray(kept), top_k, vocab_size)
    logs = keeping("reverse_kl").normalized(logs)
    assert torch.equal(ids, ids_CK)
    assert (logs.exp().sum(-1) - 1).abs().max() < 1e-5
    seen = log_CG > -31  # below that a probability counts as 1e-14
    assert (logs - log_CG)[seen].abs().max() < 2**-11 + 1e-5  # half a step, and half a step of the sum
    assert logs.exp()[~seen].numel() == 0 or float(logs.exp()[~seen].max()) < 1e-13


def groups_by_hand(log_CV, ids_CK):
    top = log_CV.gather(-1, ids_CK).exp()
    others = torch.ones_like(log_CV).scatter(-1, ids_CK, 0.0)
    return torch.cat((top, (log_CV.exp() * others).sum(-1, keepdim=True)), -1).log()


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("weight", [0.5, 1.0, 0.2])
@pytest.mark.support("teacher", "one")
def test_loss_and_gradient_are_those_of_autograd(name, temperature, weight):
    vocab_size, top_k = 41, 7
    logits = (2 * torch.randn(9, vocab_size)).requires_grad_()
    labels = torch.randint(vocab_size, (9,))
    labels[2:4] = -100
    ids, theirs = top_k_of(drawn(9, vocab_size), top_k)
    labels[0] = ids[0, 3]  # a label that the teacher thinks of
    loss, each = kept_loss(logits, labels, ids, theirs, Teaching(temperature, weight, name))
    (3 * loss).backward()
    wide = logits.detach().double().requires_grad_()
    kept = labels != -100
    ours = groups_by_hand((wide / temperature).log_softmax(-1), ids)
    divergence = temperature**2 * divergences(theirs.double(), ours, name).flatten()[kept].sum()
    entropy = F.cross_entropy(wide, labels, reduction="sum", ignore_index=-100)
    expected = (1 - weight) * entropy + weight * divergence
    (3 * expected).backward()
    # bound: FP32 sums over 41 logits, each a few units
    assert abs(float(loss) - float(expected)) < 1e-5 * abs(float(expected)) + 1e-5
    difference = (logits.grad - wide.grad).abs()
    assert difference.max() < 2e-6 * float(wide.grad.abs().max()) * 8, float(difference.max())
    assert float(each[~kept].abs().max()) == 0
    assert each[:, 0].sum() == pytest.approx(float(entropy), rel=1e-5)
    assert each[:, 1].sum() == pytest.approx(float(divergence), rel=1e-4)
    assert not each.requires_grad


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("turn", range(3))
def test_groups_never_diverge_more_than_whole_distributions(turn, name):
    """And as much where the student spreads the others' share as its teacher does; with all tokens but one, always."""
    p, q = drawn(4, 30), drawn(4, 30)
    zero, labels = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    whole = float(divergences(p, q, name).sum())
    found = [float(kept_loss(q, labels, *top_k_of(p, k), Teaching(1.0, 1.0, name))[0]) for k in (1, 5, 20, 29)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(whole, rel=1e-4)
    ids, groups = top_k_of(p, 5)
    rest = q.scatter(-1, ids, -torch.inf).log_softmax(-1)  # the teacher's others, spread as the student's
    spread = (rest + groups[:, -1:]).scatter(-1, ids, groups[:, :-1])
    assert float(divergences(spread, q, name).sum()) == pytest.approx(found[1], rel=1e-4)
    assert torch.isfinite(kept_loss(300 * q, zero, ids, groups, Teaching(1.0, 1.0, name))[0])

"""Tokens drawn from a teacher: all that is promised of a draw, and means over all draws against whole distributions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.models.distill.divergences import Teaching, divergences
from tilewright.models.distill.kept_loss import kept_loss
from tilewright.models.distill.kept_tokens import decode, encode, keeping
from tilewright.models.distill.sampled import normalized, sample_tokens, weights
from tilewright.models.distill.top_k import top_k_of

DRAWS = 2000


def drawn(rows, vocab_size, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, vocab_size, generator=generator)).log_softmax(-1)


@settings(max_examples=60, deadline=None)
@given(
    vocab_size=st.integers(2, 400),
    share=st.floats(0, 1),
    scale=st.sampled_from([0.0, 0.1, 1.0, 3.0, 12.0, 60.0]),
    seed=st.integers(0, 99),
    number=st.floats(0, 1, exclude_max=True, width=32),
)
def test_a_draw_has_so_many_tokens_and_their_weights_add_up(vocab_size, share, scale, seed, number):
    top_k = max(1, min(vocab_size - 1, 256, round(share * vocab_size)))
    log_CV = drawn(5, vocab_size, scale, seed)
    ids, logs = sample_tokens(log_CV, top_k, torch.full((5,), number))
    assert ids.shape == (5, top_k)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    p = log_CV.double().exp().clamp_min(1e-14)
    assert (logs[:, :-1] - p.gather(-1, ids).log()).abs().max() < 1e-5  # FP32 of at most 32 nats
    found = weights(logs.double())
    assert (found.sum(-1) - 1).abs().max() < 1e-5
    assert (found >= p.gather(-1, ids) * (1 - 1e-5)).all()
    # The likeliest that is not there has at most the weight of those that were drawn.
    missing = p.scatter(-1, ids, 0.0).amax(-1)
    assert (missing <= logs[:, -1].double().exp() * (1 + 1e-5)).all()
    kept = decode(encode(ids, logs, vocab_size), top_k, vocab_size)
    assert torch.equal(kept[0], ids)
    # bound: half a step of 2^-11 nats, twice; below e^-32 all is kept as that
    assert ((weights(normalized(kept[1])).double() - found).abs() <= 2**-10 * found + 1e-13).all()
    assert (weights(normalized(kept[1])).sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("top_k", [1, 4, 20, 49])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_over_all_draws_the_gradient_is_that_of_the_whole(top_k, scale):
    """A token is there for numbers of an interval that is as long as its probability to be there: with so many numbers
    at equal distances, its share of them is right to one of them."""
    theirs, ours = drawn(1, 50, scale, 1), drawn(1, 50, 1.0, 2)
    numbers = (torch.arange(DRAWS) + 0.5) / DRAWS
    ids, logs = sample_tokens(theirs.expand(DRAWS, -1), top_k, numbers)
    logits = ours.expand(DRAWS, -1).clone().requires_grad_()
    labels = torch.zeros(DRAWS, dtype=torch.int64)
    loss, each = kept_loss(logits, labels, ids, logs, Teaching(1.0, 1.0, "forward_kl"))
    loss.backward()
    p, q, level = theirs.double().exp()[0], ours.double().exp()[0], float(logs[0, -1].exp())
    error = (logits.grad.double().mean(0) - (q - p)).abs().max()
    assert error < 1.5 * level / DRAWS + 1e-6
    whole = float(divergences(theirs.double(), ours.double(), "forward_kl"))
    furthest = float((theirs - ours).abs().max())
    assert float(each[:, 1].double().mean()) == pytest.approx(whole, abs=50 * furthest * level / DRAWS + 1e-4)
    # The noise is what the rule of the draw promises, and no other rule with as many tokens has less.
    noise = (logits.grad.double() - (q - p)).square().sum(-1).mean()
    promised = (p * (level - p).clamp_min(0)).sum()
    assert float(noise) == pytest.approx(float(promised), rel=0.02, abs=50 * level**2 / DRAWS + 1e-9)


def test_gradients_of_likeliest_tokens_are_not_those_of_the_whole():
    """Why tokens are drawn: of a flat teacher the groups say nothing of half of the probability."""
    theirs, ours = drawn(64, 300, 1.0, 3), drawn(64, 300, 1.0, 4)
    whole = ours.exp() - theirs.exp()
    ids, groups = top_k_of(theirs, 32)
    q_CG = torch.cat((ours.gather(-1, ids), ours.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1).exp()
    of_groups = ours.exp() * ((q_CG[:, -1:] - groups[:, -1:].exp()) / q_CG[:, -1:])
    of_groups = of_groups.scatter(-1, ids, q_CG[:, :-1] - groups[:, :-1].exp())
    assert (of_groups - whole).norm() > 0.4 * whole.norm()


def test_loss_and_gradient_are_those_of_autograd():
    """Of one draw, in FP64, at another temperature and beside cross-entropy."""
    generator = torch.Generator().manual_seed(5)
    logits = (2 * torch.randn(9, 41, generator=generator)).requires_grad_()
    labels = torch.randint(41, (9,), generator=generator)
    labels[2:4] = -100
    ids, theirs = sample_tokens(drawn(9, 41, 2.0), 7, torch.rand(9, generator=generator))
    loss, each = kept_loss(logits, labels, ids, theirs, Teaching(2.0, 0.3, "forward_kl"))
    loss.backward()
    wide, kept = logits.detach().double().requires_grad_(), labels != -100
    ours = (wide / 2).log_softmax(-1).gather(-1, ids)
    counts = torch.maximum(theirs[:, :-1], theirs[:, -1:]).double().exp()
    divergence = 4 * (counts * (theirs[:, :-1].double() - ours)).sum(-1)[kept].sum()
    entropy = torch.nn.functional.cross_entropy(wide, labels, reduction="sum", ignore_index=-100)
    expected = 0.7 * entropy + 0.3 * divergence
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert (logits.grad - wide.grad).abs().max() < 1e-5 * wide.grad.abs().max()
    assert float(each[~kept].abs().max()) == 0


def test_which_tokens_are_kept_follows_from_the_divergence():
    assert {name: keeping(name).name for name in ("forward_kl", "reverse_kl", "jensen_shannon")} == {
        "forward_kl": "sampled", "reverse_kl": "likeliest", "jensen_shannon": "likeliest",
    }  # fmt: skip

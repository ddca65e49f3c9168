"""The numbers of a proof against their definitions, in plain NumPy and PyTorch."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compress.prove.compare import compare
from tilewright.compress.prove.held_out import ReferenceAnswer


def expected(logits, labels, domain):
    log_probs = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    return ReferenceAnswer(("a", "b"), domain, labels, log_probs, [[1, 2], [3]])


@given(st.integers(0, 2**31), st.floats(0, 3), st.floats(-50, 50))
@settings(max_examples=30, deadline=None)
def test_against_torch(seed, noise, shift):
    draw = np.random.default_rng(seed)
    ours, labels, domain = draw.normal(size=(6, 11)), draw.integers(0, 11, 6), np.array([0, 0, 1, 1, 1, 0])
    theirs = ours + noise * draw.normal(size=ours.shape)
    found = compare(expected(ours, labels, domain), theirs + shift, [[1, 2], [4]])
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (ours, theirs))
    kl_N = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(found.kl, kl_N.mean(), atol=1e-12)
    np.testing.assert_allclose(found.kl_max, kl_N.max(), atol=1e-12)
    np.testing.assert_allclose(found.log_prob_max, (p - q).abs().max(), atol=1e-10)
    for index, name in enumerate("ab"):
        mine = torch.from_numpy(domain == index)
        losses = [torch.nn.functional.nll_loss(x[mine], torch.from_numpy(labels)[mine]) for x in (p, q)]
        np.testing.assert_allclose(found.loss[name], losses, atol=1e-12)
    assert found.token_ids == (1, 2)


def test_a_token_that_a_runtime_rounds_to_nothing_does_not_make_it_fail():
    logits = np.array([[0.0, -200.0], [0.0, -1.0]])
    theirs = np.array([[0.0, -np.inf], [0.0, -1.0]])
    found = compare(expected(logits, np.array([0, 0]), np.array([0, 1])), theirs, None)
    assert found.kl < 1e-12
    assert found.token_ids is None


def test_what_is_no_answer_is_said():
    given = expected(np.zeros((2, 3)), np.array([0, 0]), np.array([0, 1]))
    assert compare(given, np.full((2, 3), np.nan), None) == "its logits are not finite"
    assert compare(given, np.zeros((2, 4)), None) == "answered [2, 4] numbers, [2, 3] were asked for"

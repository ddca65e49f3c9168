"""The numbers of a proof against their definitions, in plain NumPy and PyTorch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.compress.export.targets import TARGETS
from tilewright.compress.prove.compare_answers import compare
from tilewright.compress.prove.held_out import ReferenceAnswer
from tilewright.compress.prove.texts.compare_texts import ReferenceTexts, compare_texts
from tilewright.compress.prove.tolerance import FEWEST_CLEAR, TOLERANCES, beyond


def expected(logits, labels, domain):
    log_probs = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    return ReferenceAnswer(("a", "b"), domain, labels, log_probs)


@given(st.integers(0, 2**31), st.floats(0, 3), st.floats(-50, 50))
@examples(30)
def test_against_torch(seed, noise, shift):
    draw = np.random.default_rng(seed)
    ours, labels, domain = draw.normal(size=(6, 11)), draw.integers(0, 11, 6), np.array([0, 0, 1, 1, 1, 0])
    theirs = ours + noise * draw.normal(size=ours.shape)
    found = compare(expected(ours, labels, domain), theirs + shift)
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (ours, theirs))
    kl_N = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(found.kl, kl_N.mean(), atol=1e-12)
    np.testing.assert_allclose(found.kl_max, kl_N.max(), atol=1e-12)
    np.testing.assert_allclose(found.log_prob_max, (p - q).abs().max(), atol=1e-10)
    for index, name in enumerate("ab"):
        mine = torch.from_numpy(domain == index)
        losses = [torch.nn.functional.nll_loss(x[mine], torch.from_numpy(labels)[mine]) for x in (p, q)]
        np.testing.assert_allclose(found.loss[name], losses, atol=1e-12)
    clear = np.sort(p.numpy(), 1)[:, -1] - np.sort(p.numpy(), 1)[:, -2] >= np.log(2)
    same = p.argmax(1).numpy() == q.argmax(1).numpy()
    assert (found.clear, found.top1) == (clear.sum(), same.mean())
    assert found.top1_clear == (same[clear].mean() if clear.any() else None)
    again = compare(expected(theirs, labels, domain), ours, q.numpy())
    np.testing.assert_allclose(again.kl, compare(expected(theirs, labels, domain), ours).kl, atol=1e-12)


def test_a_token_that_a_runtime_rounds_to_nothing_does_not_make_it_fail():
    logits = np.array([[0.0, -200.0], [0.0, -1.0]])
    theirs = np.array([[0.0, -np.inf], [0.0, -1.0]])
    found = compare(expected(logits, np.array([0, 0]), np.array([0, 1])), theirs)
    assert found.kl < 1e-12


def test_what_is_no_answer_is_said():
    given = expected(np.zeros((2, 3)), np.array([0, 0]), np.array([0, 1]))
    assert compare(given, np.full((2, 3), np.nan)) == "its logits are not finite"
    assert compare(given, np.zeros((2, 4))) == "answered [2, 4] numbers, [2, 3] were asked for"


TEXTS = ReferenceTexts(
    ["a", "b", "odd"], [[1], [2], [3, 4]], num_documents=2, begin=[9], facts={"positions": 64, "chat_template": "x"}
)


@pytest.mark.parametrize(
    ("plain", "special", "facts", "words"),
    [
        ([[1], [2], [3, 4]], [[9, 3, 4]], {"positions": 64}, ()),
        ([[1], [2], [3, 4]], [[3, 4]], {}, ("other begin or end", "[3, 4] in place of [9, 3, 4]")),
        ([[1], [2], [5]], [[9, 5]], {}, ("1 of 3 texts", "'odd'", "[5] in place of [3, 4]")),
        ([[7], [2], [3, 4]], [[9, 3, 4]], {}, ("1 of 3 texts", "'a'")),
        ([[1], [2], [3, 4]], [[9, 3, 4]], {"positions": 32}, ("positions: 32 in place of 64",)),
        (None, None, {"chat_template": "x\n"}, ()),  # Jinja drops it
        (None, None, {"chat_template": "x\n\n"}, ("chat_template",)),
        (None, None, {"chat_template": "y"}, ("chat_template: 'y' in place of 'x'",)),
        (None, None, {}, ()),
    ],
)
def test_texts_and_what_an_artefact_says_of_itself(plain, special, facts, words):
    counts, told = compare_texts(TEXTS, plain, special, facts)
    assert bool(told) == bool(words), told
    assert all(word in told for word in words), told
    if plain is None:
        assert counts == {"token_ids": None}
    else:
        right = [a == b for a, b in zip(plain, TEXTS.token_ids, strict=True)]
        assert counts["token_ids"] == {"equal": sum(right[:2]), "documents": 2}
        assert counts["odd_texts"] == {"equal": sum(right[2:]), "texts": 1}


def test_each_target_has_limits_with_a_source():
    assert set(TOLERANCES) == {target.name for target in TARGETS}
    for name, limit in TOLERANCES.items():
        assert limit.source, name
        assert 0 < (limit.stored or limit.kl) <= limit.kl < 1, name
        assert 0.5 < limit.top1 < 1, name


@given(
    st.sampled_from(sorted(TOLERANCES)),
    st.floats(0, 3),
    st.floats(0, 3),
    st.floats(0, 1) | st.none(),
    st.integers(0, 40),
)
def test_what_is_beyond_a_limit_is_said(name, kl, stored, top1, clear):
    limit = TOLERANCES[name]
    told = beyond(limit, {"kl": kl, "stored": {"kl": stored}, "top1_clear": top1, "clear": clear})
    assert ("from the model" in told) == (kl > limit.kl)
    assert ("that are stored" in told) == (limit.stored is not None and stored > limit.stored)
    assert ("clear targets" in told) == (top1 is not None and top1 < limit.top1 and clear >= FEWEST_CLEAR)
    assert "from the model" in beyond(limit, {"kl": float("nan")})

"""Answers side by side: by seed the same as alone, prompts that do not hold others up, memory within its budget."""

import pytest
import torch

from tests.serving.served import make_batch, make_session
from tilewright.models.sampling import Sampling
from tilewright.serving.next_token import AnswerSettings

QUESTIONS = ["hello", "hello Paris", "weather in Paris? " * 6, "No", "you are a system", "42! " * 20]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def session(request, tmp_path_factory):
    return make_session(tmp_path_factory.mktemp(request.param) / "model", request.param)


def answer_to(session, question, seed, tokens=24):
    ids = session.chat_ids([{"role": "user", "content": question}])
    return session.answer(ids, AnswerSettings(tokens, Sampling(1.3), seed=seed), turn=True)


class Seen:
    """An answer that keeps the logits that it is drawn from."""

    def __init__(self, answer):
        self.answer, self.logits, self.text = answer, [], ""
        take = answer.take

        def seen(logits_V):
            self.logits.append(logits_V.clone())
            piece = take(logits_V)
            self.text += piece.text
            return piece

        answer.take = seen


def run(batch, starts):
    """Answers that begin at steps, drawn to their ends; the answers in the order given."""
    seen = [Seen(answer) for _, answer in starts]
    waiting = [(start, one) for (start, _), one in zip(starts, seen, strict=True)]
    active, step = [], 0
    while waiting or active:
        for start, one in list(waiting):
            if start <= step and len(active) < 4 and batch.begin(one.answer):
                waiting.remove((start, one))
                active.append(one)
        for _, outcome in batch.step([one.answer for one in active]):
            assert not isinstance(outcome, BaseException), outcome
        for one in [one for one in active if one.answer.finish_reason]:
            batch.end(one.answer)
            active.remove(one)
        step += 1
    return seen


def test_a_seed_gives_the_same_bits_alone_and_beside_others(session):
    batch = make_batch(session, 4, chunk=16)
    starts = [(3 * i, answer_to(session, question, seed=i)) for i, question in enumerate(QUESTIONS)]
    together = run(batch, starts)
    for i, question in enumerate(QUESTIONS):
        (alone,) = run(make_batch(session, 4, chunk=16), [(0, answer_to(session, question, seed=i))])
        assert alone.text == together[i].text
        assert torch.equal(torch.stack(alone.logits), torch.stack(together[i].logits))
    assert not batch.reserved_bytes


def test_without_a_seed_logits_are_near_those_alone(session):
    """Greedy, so that the tokens are the same: FP32 sums in another order, over two layers of 32 columns."""

    def greedy(question):
        ids = session.chat_ids([{"role": "user", "content": question}])
        return session.answer(ids, AnswerSettings(12, Sampling(0)), turn=True)

    together = run(make_batch(session, 4), [(i, greedy(question)) for i, question in enumerate(QUESTIONS)])
    for question, one in zip(QUESTIONS, together, strict=True):
        (alone,) = run(make_batch(session, 4), [(0, greedy(question))])
        assert alone.text == one.text
        torch.testing.assert_close(torch.stack(alone.logits), torch.stack(one.logits), rtol=1e-4, atol=1e-4)


def test_a_long_prompt_holds_the_others_up_by_a_chunk_at_most(session):
    batch = make_batch(session, 4, chunk=8)
    short, long = answer_to(session, "hello", 1, tokens=60), answer_to(session, "weather " * 60, 2)
    assert len(long.ids) > 8 * 8
    assert batch.begin(short)
    while not short.num_tokens:
        batch.step([short])
    assert batch.begin(long)
    sizes = []
    prefill = batch._rows.prefill

    def counted(row):
        before = row.num_run
        logits = prefill(row)
        sizes.append(row.num_run - before)
        return logits

    batch._rows.prefill = counted
    while not long.num_tokens and short.finish_reason is None:
        drawn, before = short.num_tokens, len(sizes)
        batch.step([short, long])
        assert short.num_tokens == drawn + 1 or short.finish_reason
        assert sum(sizes[before:]) <= 8
    assert max(sizes) == 8


def test_several_short_prompts_share_a_chunk(session):
    batch = make_batch(session, 4, chunk=128)
    answers = [answer_to(session, question, 0) for question in QUESTIONS[:4]]
    assert all(batch.begin(answer) for answer in answers)
    assert len(batch.step(answers)) >= 2


def test_memory_is_reserved_before_and_never_above_the_budget(session):
    answers = [answer_to(session, "hello Paris", i) for i in range(4)]
    positions = len(answers[0].ids) + answers[0].max_tokens
    one = make_batch(session, 4)
    assert one.begin(answers[0])
    size = one.reserved_bytes
    batch = make_batch(session, 4, budget_bytes=int(2.5 * size))
    assert [batch.begin(answer) for answer in answers] == [True, True, False, False]
    assert batch.most_positions == int(2.5 * positions)
    while answers[0].finish_reason is None:
        batch.step(answers[:2])
        taken = sum(row.cache.num_bytes for row in batch._begun.values())
        assert taken <= batch.reserved_bytes <= batch.budget_bytes
    batch.end(answers[0])
    assert batch.begin(answers[2])
    assert not batch.begin(answers[3])


def test_an_error_of_one_draw_is_its_own_and_a_panic_too(session):
    batch = make_batch(session, 4)
    good, bad = answer_to(session, "hello", 1), answer_to(session, "hello", 2)

    class Panic(BaseException):
        pass

    def panics(logits_V):
        raise Panic("a tokenizer's")

    bad.take = panics
    assert batch.begin(good)
    assert batch.begin(bad)
    outcomes = dict(batch.step([good, bad]))
    assert isinstance(outcomes[bad], Panic)
    batch.end(bad)
    while good.finish_reason is None:
        ((_, outcome),) = batch.step([good])
        assert not isinstance(outcome, BaseException)

"""An answer drawn piece by piece against one made at once, and what a conversation becomes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serving.served import make_session
from tilewright.models.sampling import Sampling
from tilewright.serving.next_token import AnswerSettings
from tilewright.serving.session import PromptTooLongError, fitting

TALK = [{"role": "system", "content": "you are"}, {"role": "user", "content": "hello Paris"}]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    return tmp_path_factory.mktemp(request.param) / "model", request.param


@pytest.fixture(scope="module")
def session(folder):
    return make_session(*folder)


def test_ids_are_those_of_apply_chat_template(folder, session):
    theirs = AutoTokenizer.from_pretrained(folder[0]).apply_chat_template(TALK, add_generation_prompt=True)
    theirs = theirs["input_ids"] if not isinstance(theirs, list) else theirs
    assert session.chat_ids(TALK) == list(theirs)


def test_a_greedy_answer_is_that_of_transformers(folder, session):
    ids = session.chat_ids(TALK)
    net = AutoModelForCausalLM.from_pretrained(folder[0], dtype=torch.float32)
    whole = net.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None)[0, len(ids) :]
    answer = session.answer(ids, AnswerSettings(24, Sampling(0)), turn=True)
    tokens = whole.tolist()
    ends = [i for i, token in enumerate(tokens) if token in session.template().stops.ids]
    assert "".join(answer) == session.tokenizer.decode(tokens[: ends[0]] if ends else tokens)
    assert answer.finish_reason == ("stop" if ends else "length")


def test_a_seed_gives_the_same_answer_and_a_stop_string_cuts_it(session):
    ids = session.chat_ids(TALK)
    texts = ["".join(session.answer(ids, AnswerSettings(40, seed=5), turn=True)) for _ in range(2)]
    assert texts[0] == texts[1]
    text = texts[0]
    stop = text[10:13]
    answer = session.answer(ids, AnswerSettings(40, stop=(stop,), seed=5), turn=True)
    assert "".join(answer) == text[: text.find(stop)]
    assert answer.finish_reason == "stop"


def test_the_last_position_is_the_end(session):
    assert session.max_positions == 256
    ids = session.text_ids("hello " * 20)
    ids = (ids * 20)[:250]
    answer = session.answer(ids, AnswerSettings(100, Sampling(0)), turn=False)
    "".join(answer)
    assert answer.num_tokens <= 6
    with pytest.raises(PromptTooLongError, match="longer than the model's context"):
        session.answer((ids * 2)[:256], AnswerSettings(1), turn=False)


def test_the_oldest_turns_are_dropped_and_the_system_message_stays(session):
    talk = TALK[:1]
    for i in range(30):
        talk = [*talk, {"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "Yes!"}]
    talk = [*talk, {"role": "user", "content": "weather?"}]
    kept, ids = fitting(session, talk, room=64)
    assert len(ids) + 64 <= 256
    assert len(kept) < len(talk)
    assert kept[0] == talk[0]
    assert kept[1]["role"] == "user"
    assert kept[1:] == talk[-len(kept) + 1 :]
    assert json.dumps(fitting(session, TALK, room=64)[0]) == json.dumps(TALK)

"""Answers of a scripted model: the text of all ids up to the first stop string; and what is no conversation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat.families import make_folder
from tests.draws import examples
from tests.serving.scripted import PROMPT, scripted
from tests.serving.test_token_text import letter_by_letter
from tilewright.core.errors import DataError
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer
from tilewright.models.sampling import Sampling
from tilewright.serving.next_token import AnswerSettings

TEXTS = st.text(st.sampled_from("abEND .\n\té€🦊e\u0301"), min_size=1, max_size=30)
NAMES = ("chatml", "mistral")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {name: load_tokenizer(make_folder(tmp_path_factory.mktemp(name), name)) for name in NAMES}


def answer(session, prompt, num_tokens, stop=()):
    stream = session.answer(prompt, AnswerSettings(num_tokens, Sampling(0), tuple(stop)), turn=False)
    return "".join(stream), stream


@examples(100)
@given(st.sampled_from(NAMES), st.lists(TEXTS, min_size=1, max_size=5), st.lists(TEXTS, max_size=2), st.data())
def test_an_answer_is_the_text_of_its_ids_up_to_the_first_stop_string(tokenizers, name, texts, stops, data):
    tokenizer = tokenizers[name]
    ids = [i for text in texts for i in tokenizer.encode(text)]  # pieces that one text would not be cut into
    begin = tokenizer.decode(PROMPT)
    text = tokenizer.decode([*PROMPT, *ids])[len(begin) :]
    for _ in range(data.draw(st.integers(0, 2))):
        start = data.draw(st.integers(0, len(text)))
        stops = [*stops, *([found] if (found := text[start : start + 4]) else [])]
    expected, stopped = letter_by_letter(text, stops)
    found, stream = answer(scripted(ids, tokenizer), PROMPT, len(ids), stops)
    assert (found, stream.finish_reason) == (expected, "stop" if stopped else "length")


@examples(50)
@given(st.sampled_from(NAMES), TEXTS, TEXTS)
def test_a_continued_text_and_its_beginning_are_the_text_of_all_ids(tokenizers, name, begin, rest):
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(rest)
    before = scripted(ids, tokenizer).text_ids(begin)
    found, _ = answer(scripted(ids, tokenizer, prompt=len(before)), before, len(ids))
    assert tokenizer.decode(before) + found == tokenizer.decode([*before, *ids])


def test_a_layout_that_the_tokenizer_does_not_know_ends_by_its_text():
    tokenizer = train_tokenizer(["hello you " * 20], 300)
    session = scripted(
        tokenizer.encode("Yes<|im_end|>\n<|im_start|>user"), tokenizer, ChatTemplate.load("", tokenizer, "chatml")
    )
    assert "".join(session.answer(PROMPT, AnswerSettings(40, Sampling(0)), turn=True)) == "Yes"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "Conversation without messages"),
        (["hello"], "Message without role or content"),
        ([{"role": "user"}], "Message without role or content"),
        ([{"role": "user", "content": 3}], "Message without role or content"),
        ([{"role": "user", "content": "\ud83e"}], "not valid Unicode"),
        ([{"role": "user", "content": "hello \udcff"}], "byte 0xff at character 7"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud83e"}]}], "not valid Unicode"),
        ([{"role": "assistant", "content": "no"}], "refuses"),
        ([{"role": "user", "content": "hello"}] * 2, "refuses"),
        ([{"role": "tool", "content": "hello"}], "refuses"),
    ],
)
def test_what_is_no_conversation_of_this_model_is_an_error_in_four_parts(messages, what, tmp_path):
    folder = make_folder(tmp_path, "mistral")
    tokenizer = load_tokenizer(folder)
    session = scripted([0], tokenizer, ChatTemplate.load(str(folder), tokenizer))
    with pytest.raises(DataError, match=what) as error:
        session.chat_ids(messages)
    problem = error.value.problems[0]
    assert all((problem.got, problem.need, problem.try_, problem.where)), problem


def test_a_prompt_of_half_a_character_is_an_error(tokenizers):
    with pytest.raises(DataError, match="not valid Unicode"):
        scripted([0], tokenizers["chatml"]).text_ids("\ud83e")

"""Rows that are rendered in one request are those that are rendered one by one, whatever one of them does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat.families import make_folder
from tests.data.chat.test_chat_rows import talks
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.chat import row_renderer, sandbox
from tilewright.data.chat.chat_rows import read_row
from tilewright.data.chat.errors import ChatError, TemplateTooMuchError
from tilewright.data.chat.load import CHATML
from tilewright.data.chat.row_renderer import RowRenderer
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.limited_process import LimitedProcess
from tilewright.data.common.tokenizer import load_tokenizer

NAMES = ("qwen3", "llama31", "marked", "mistral_first")
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}
_LOOP = "{% for a in range(99999) %}"
HEAVY = "{% if messages[0].content == 'heavy' %}" + _LOOP * 2 + "{% endfor %}" * 2 + "{% endif %}"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    root = tmp_path_factory.mktemp("render")
    folders = {name: make_folder(root / name, name) for name in NAMES}
    return {name: ChatTemplate.load(str(folder), load_tokenizer(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_folder(tmp_path_factory.mktemp("chatml"), "chatml"))


def outcome(rendered):
    """What a row becomes, in a form that can be compared."""
    if isinstance(rendered, DataError):
        return type(rendered).__name__, rendered.problems[0].what, rendered.problems[0].got
    found = [(s.text, s.ids_T.tolist(), s.trained_T.tolist(), s.spans, s.saved) for s in rendered.samples]
    return found, rendered.left_out


def said(word):
    """A row of one question."""
    return {"messages": [{**USER, "content": word}, ANSWER]}


@st.composite
def odd_rows(draw):
    """A conversation, or one of which the template, JSON or the check of what is said makes a reject."""
    messages, tools = draw(talks())
    found = read_row({"messages": messages, "tools": tools}, pairs=False)[1] if _is_read(messages, tools) else None
    deep: list = []
    for _ in range(3000):
        deep = [deep]
    odd = [
        {"messages": [USER]},
        {"messages": [{**USER, "content": "hi <|im_end|><|eot_id|></s>"}, ANSWER]},
        {"messages": [USER, ANSWER], "variables": {"x": deep}},
        {"messages": [USER, ANSWER], "tools": [{"type": "function", "function": {"name": "unseen"}}]},
    ]
    return found if found and draw(st.integers(0, 3)) else draw(st.sampled_from(odd))


def _is_read(messages, tools):
    try:
        read_row({"messages": messages, "tools": tools}, pairs=False)
    except ChatError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
@given(rows=st.lists(odd_rows(), min_size=2, max_size=5))
@examples(8)
def test_rows_in_one_request_are_rows_one_by_one(chats, name, rows):
    chat = chats[name]
    apart = [outcome(one) for row in rows for one in RowRenderer(chat, pairs=False).render([row])]
    assert [outcome(one) for one in RowRenderer(chat, pairs=False).render(rows)] == apart


def test_many_rows_take_one_request(tokenizer, monkeypatch):
    chat = ChatTemplate(CHATML, tokenizer)
    list(RowRenderer(chat, pairs=False).render([said("first")]))  # what is found of the template once
    calls = []
    call = LimitedProcess.call
    monkeypatch.setattr(LimitedProcess, "call", lambda *given, **named: calls.append(given) or call(*given, **named))
    rows = [said(f"word {i}") for i in range(50)]
    assert all(len(one.samples) == 1 for one in RowRenderer(chat, pairs=False).render(rows))
    pairs = [{"prompt": [USER], "chosen": [{**ANSWER, "content": f"yes {i}"}], "rejected": [ANSWER]} for i in range(9)]
    assert all(len(one.samples) == 2 for one in RowRenderer(chat, pairs=True).render(pairs))
    assert len(calls) == 2


def test_a_row_that_takes_too_much_takes_no_other_with_it_and_many_are_an_error(tokenizer, monkeypatch):
    monkeypatch.setattr(sandbox, "_CPU_S", 0.3)
    monkeypatch.setattr(row_renderer, "_MAX_HEAVY", 1)
    chat = ChatTemplate(HEAVY + CHATML, tokenizer)
    rows = [said("a"), said("heavy"), said("b")]
    renderer = RowRenderer(chat, pairs=False)
    first, heavy, third = renderer.render(rows)
    assert isinstance(heavy, TemplateTooMuchError)
    plain = ChatTemplate(CHATML, tokenizer)
    assert [outcome(first), outcome(third)] == [
        outcome(one) for one in RowRenderer(plain, pairs=False).render(rows[::2])
    ]
    with pytest.raises(TemplateTooMuchError):
        list(renderer.render([rows[1]]))


def test_pairs_that_cannot_be_told_apart_are_set_aside(tokenizer):
    chat = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content | lower }}\n{% endfor %}", tokenizer)
    loud = {**ANSWER, "content": "YOU"}
    rows = [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [loud]},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "other"}]},
    ]
    equal, fine = RowRenderer(chat, pairs=True).render(rows)
    assert isinstance(equal, ChatError)
    assert len(fine.samples) == 2
    assert not np.array_equal(fine.samples[0].ids_T, fine.samples[1].ids_T)

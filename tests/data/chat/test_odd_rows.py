"""Rows with fields of any kind: read as one of the shapes, or refused with a reason. Never a traceback."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import examples
from tilewright.data.chat.chat_rows import read_whole
from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.messages import say

TALK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
MESSAGE_FIELDS = (
    *("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call", "weight", "train"),
    *("reasoning_content", "thinking", "train_detail", "refusal", "images", "id"),
)
ROW_FIELDS = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected", "instruction", "input", "output"),
    *("system", "history", "tools", "functions", "chat_template_kwargs", "preferred_output", "non_preferred_output"),
    *("weight", "reasoning", "label", "response"),
)
VALUES = st.sampled_from(
    [None, True, 0, 1.5, "", "x", "[", "{}", "[]", "null", [], {}, [1], [[]], [{}], [None], {"a": 1}, {"role": "user"},
     [["a"]], [["a", None]], TALK, TALK[:1], [{"role": ["user"]}], [{"from": 1, "value": []}], '[{"role": "user"}]',
     [{"role": "assistant", "tool_calls": [{"id": [], "function": {"name": "f", "arguments": "{}"}}]},
      {"role": "tool", "tool_call_id": [], "content": "1"}]]
)  # fmt: skip
MESSAGES = st.lists(
    st.builds(
        lambda role, more: {"role": role, "content": "x", **more},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.dictionaries(st.sampled_from(MESSAGE_FIELDS), VALUES, max_size=2),
    ),
    max_size=4,
)


@examples(1000)
@given(st.dictionaries(st.sampled_from(ROW_FIELDS), VALUES | MESSAGES, min_size=1, max_size=4), st.booleans())
def test_any_fields_are_a_row_or_a_reason(row, pairs):
    try:
        read = read_whole(row, pairs)
    except ChatError as error:
        said = error.reason
    else:
        said = read.shape
    assert said


@pytest.mark.parametrize("answers", [{"chosen": TALK, "rejected": "no"}, {"chosen": "yes", "rejected": TALK}])
def test_pairs_without_an_answer_behind_the_prompt(answers):
    with pytest.raises(ChatError, match="without an answer"):
        read_whole({"prompt": TALK, **answers}, pairs=True)


@pytest.mark.parametrize(("who", "what"), [("role", "content"), ("from", "value")])
def test_a_prompt_that_is_messages_as_json_is_read_as_them(who, what):
    message = {who: "user", what: "hi"}
    for prompt in ([message], message):
        read = read_whole({"prompt": json.dumps(prompt), "completion": "yes"}, pairs=False)
        assert read.found["messages"] == [say("user", "hi"), say("assistant", "yes")]
    for text in map(json.dumps, ([{"n": 1}], {"n": 1}, [message, 3], [])):  # a text that happens to be JSON
        read = read_whole({"prompt": text, "completion": "yes"}, pairs=False)
        assert read.found["messages"] == [say("user", text), say("assistant", "yes")]

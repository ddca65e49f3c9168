"""Rows of generated fields: what a row says is rendered, or the row is set aside and the reason names the field.

The reference renders prefixes with transformers' `apply_chat_template` and knows the layouts, not our code. Each text
of a row has words of its own, so that finding them in a rendering proves that it is there.
"""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat.families import make_folder
from tests.draws import examples
from tilewright.data.chat.chat_rows import read_row
from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.tools import TemplateArguments
from tilewright.data.chat.trained_tokens import render_answers
from tilewright.data.common.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

NAMES = ("qwen3", "llama31", "deepseek_calls", "chatml", "marked", "gemma", "mistral_first")
TURN_ENDS = {
    "llama31": "<|eot_id|>",
    "deepseek_calls": "<｜end▁of▁sentence｜>",
    "gemma": "<end_of_turn>",
    "mistral_first": "</s>",
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    found = {}
    for name in NAMES:
        folder = make_folder(root / name, name)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        found[name] = ChatTemplate.load(str(folder), load_tokenizer(folder)), theirs
    return found


class Words:
    """A new word each time, in some text of the kind that people write."""

    FORMS = ("{}", " {}", "{}\n", "say {} or {}", '"{}"\n\n{}', "naïve {}", "<b>{}</b>", "{{'a': '{}'}}")

    def __init__(self, draw):
        self.draw, self.number = draw, 0

    def __call__(self):
        form = self.draw(st.sampled_from(self.FORMS))
        return form.format(*(self.name() for _ in range(form.count("{}"))))

    def name(self):
        self.number += 1
        return f"w{self.number}q"


@st.composite
def talks(draw):
    """A conversation in OpenAI's form, arguments as objects, with a random subset of fields."""
    say = Words(draw)
    tools = draw(st.booleans())
    messages = [{"role": "system", "content": say()}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": say()})
        if tools and draw(st.booleans()):
            calls = [
                {
                    "id": f"call{turn}{i:04d}",
                    "type": "function",
                    "function": {
                        "name": say.name(),
                        "arguments": {say.name(): say(), say.name(): {say.name(): [say()]}},
                    },
                }
                for i in range(draw(st.integers(1, 2)))
            ]
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", say()])), "tool_calls": calls})
            results = [{"role": "tool", "tool_call_id": call["id"], "content": say()} for call in calls]
            messages += results
        messages.append({"role": "assistant", "content": say()})
    for message in messages:
        if message["role"] == "assistant":
            if draw(st.integers(0, 3)) == 0:
                message["reasoning_content"] = say()
            weight = draw(st.sampled_from([None, None, 0, 1]))
            message |= {} if weight is None else {"weight": weight}
        elif draw(st.integers(0, 9)) == 0:
            message["name"] = say.name()
    if draw(st.integers(0, 5)) == 0:
        messages.append({"role": "user", "content": say()})
    properties = {say.name(): {"type": "string", "description": say()}}
    function = {"name": say.name(), "description": say(), "parameters": {"type": "object", "properties": properties}}
    return messages, [{"type": "function", "function": function}] if tools else []


def words_of(value):
    return set(re.findall(r"w\d+q", json.dumps(value)))


def bare(messages, name):
    """What transformers gets: arguments in the form that the template takes."""
    found = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key != "weight"}
        if name == "deepseek_calls" and "tool_calls" in kept:
            calls = [{**c, "function": {**c["function"]}} for c in kept["tool_calls"]]
            for call in calls:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            kept["tool_calls"] = calls
        found.append(kept)
    return found


def reference(name, theirs, messages, tools):
    """Of each trained answer: the ids of its rendering up to its end, and which of them are the answer's."""
    plain, found = bare(messages, name), []
    how = {"tokenize": False, "tools": tools or None}
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight") == 0:
            continue
        text = theirs.apply_chat_template(plain[: i + 1], **how)
        prompt = theirs.apply_chat_template(plain[:i], add_generation_prompt=True, **how)
        end_of_turn = TURN_ENDS.get(name, "<|im_end|>")
        text = text[: text.rindex(end_of_turn) + len(end_of_turn)]
        assert text.startswith(prompt)
        encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        found.append((encoded["input_ids"], [b > len(prompt) and a < b for a, b in encoded["offset_mapping"]]))
    return found


def attempt(chat, row):
    """What a row becomes, or why it is set aside."""
    try:
        _, read = read_row(row, pairs=False)
        return render_answers(chat, read["messages"], given=TemplateArguments(read.get("tools", ()), {})), ""
    except ChatError as error:
        return None, error.reason


def check(name, chats, row, messages, tools):
    """Whether the row is used; where it is, each of its words is in a rendering and each answer is trained once."""
    ours, theirs = chats[name]
    fields = {"content", "tool_calls", "reasoning_content", "name", "tools", "weight", "template raises"}
    rendered, reason = attempt(ours, json.loads(json.dumps(row)))
    if rendered is None:
        assert any(field in reason for field in fields), reason
        return False
    said = " ".join(sample.text for sample in rendered.samples)
    missing = words_of([messages, tools]) - words_of(said)
    if "messages behind the last answer" not in rendered.left_out:
        dropped = [n for n in rendered.left_out if n.endswith("not trained")]
        untrained = words_of([m for m in messages if m.get("weight") == 0]) if dropped else set()
        assert missing <= untrained, (missing, rendered.left_out)
    expected = reference(name, theirs, messages, tools)
    left = list(expected)
    for sample in rendered.samples:
        covered = [
            e
            for e in left
            if sample.ids_T[: len(e[0])].tolist() == e[0] and sample.trained_T[np.array(e[1]).nonzero()].all()
        ]
        union = np.zeros(len(sample.ids_T), bool)
        for ids, mask in covered:
            union[: len(ids)] |= mask
        assert (sample.trained_T == union).all()
        left = [e for e in left if e not in covered]
    assert not left, "each trained answer is in one rendering"
    return True


@pytest.mark.parametrize("name", NAMES)
@given(talk=talks())
@examples(60)
def test_a_row_is_rendered_whole_or_set_aside_and_its_answers_are_trained_by_weight(chats, name, talk):
    messages, tools = talk
    check(name, chats, {"messages": messages, **({"tools": tools} if tools else {})}, messages, tools)


def as_openai(messages, tools):
    """`arguments` as JSON text, as the API sends and takes them; fields that `model_dump()` leaves None."""
    found = []
    for message in messages:
        kept = {"refusal": None, "audio": None, "annotations": [], "function_call": None, **message}
        if "tool_calls" in message:
            kept["content"] = message["content"] or None
            kept["tool_calls"] = [
                {**c, "index": None, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"])}}
                for c in message["tool_calls"]
            ]
        found.append(kept)
    return {"messages": found, "tools": tools, "parallel_tool_calls": False}


def as_llama_factory(messages, tools):
    """ShareGPT with function_call and observation; `tools` is the JSON text of functions."""
    roles = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
    turns = []
    for message in messages:
        if "tool_calls" in message:
            calls = [call["function"] for call in message["tool_calls"]]
            turns.append({"from": "function_call", "value": json.dumps(calls[0] if len(calls) == 1 else calls)})
        else:
            turns.append({"from": roles[message["role"]], "value": message["content"]})
    return {"conversations": turns, "tools": json.dumps([tool["function"] for tool in tools])}


def as_axolotl(messages, tools):
    """`train` instead of `weight`; objects as JSON text."""
    turns = []
    for message in messages:
        kept = {key: value for key, value in message.items() if key != "weight"}
        kept |= {"train": bool(message["weight"])} if "weight" in message else {}
        turns.append(kept)
    return {"messages": json.dumps(turns), "tools": tools}


FORMATS = {"openai": as_openai, "llama_factory": as_llama_factory, "axolotl": as_axolotl}


@pytest.mark.parametrize("form", FORMATS)
@given(talk=talks())
@examples(40)
def test_formats_of_other_tools_say_the_same(chats, form, talk):
    messages, tools = talk
    if form == "llama_factory":  # has neither weights nor names nor reasoning, and no text beside a call
        messages = [{k: v for k, v in m.items() if k not in ("weight", "name", "reasoning_content")} for m in messages]
        messages = [{**m, "content": ""} if "tool_calls" in m else m for m in messages]
    ours, _ = chats["qwen3"]
    expected = attempt(ours, {"messages": messages, **({"tools": tools} if tools else {})})
    found = attempt(ours, json.loads(json.dumps(FORMATS[form](messages, tools))))
    assert found[1] == expected[1]
    if expected[0] is not None:
        assert [(s.text, s.spans) for s in found[0].samples] == [(s.text, s.spans) for s in expected[0].samples]


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight"),
        ({"messages": [USER, {**ANSWER, "weight": "0"}]}, "weight"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "weight"),
        ({"messages": [USER, {**ANSWER, "train": False}]}, "weight"),
        ({"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0}]}]}, "train_detail"),
        ({"messages": [USER, ANSWER], "weight": 0.5}, "weight"),
        ({"messages": [USER, {**ANSWER, "content": [{"type": "text", "text": "a", "weight": 0}]}]}, "part"),
        ({"messages": [USER, {**ANSWER, "content": [{"type": "image_url", "text": "a"}]}]}, "content"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "images"),
        ({"messages": [USER, ANSWER], "system": {"text": "be kind"}}, "system"),
        ({"messages": [USER, ANSWER], "reasoning": "because"}, "reasoning"),
        ({"messages": [USER, ANSWER], "history": [["before", "this"]]}, "history"),
        ({"prompt": "a", "completion": "b", "input": "c"}, "input"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "response"),
        ({"prompt": "a", "completion": "b", "label": False}, "label"),
        ({"instruction": "a", "output": "b", "history": "before"}, "history"),
        ({"messages": [USER, ANSWER], "tools": [{"x": 1}]}, "tools"),
        ({"messages": [USER, ANSWER], "tools": "not json"}, "tools"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": [USER, {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "no"}}]}]}, "tool_calls"),
        ({"messages": [USER, {**CALL, "tool_calls": "no"}]}, "tool_calls"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "no"}]}, "tool_calls"),
        ({"messages": [USER, {**ANSWER, "value": "other"}]}, "value"),
    ],
)
def test_what_cannot_be_used_is_set_aside_and_the_reason_names_the_field(row, reason):
    with pytest.raises(ChatError) as caught:
        read_row(row, pairs=False)
    assert reason in caught.value.reason


def test_alpaca_has_turns_before_and_a_thought():
    row = {"instruction": "add", "input": "1 2", "output": "3", "history": [["hello", "hi"]], "reasoning": "counting"}
    assert read_row(row, pairs=False)[1]["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "add\n\n1 2"},
        {"role": "assistant", "content": "3", "reasoning_content": "counting"},
    ]


def test_results_stand_in_the_order_of_their_calls(chats):
    calls = [{"id": i, "function": {"name": f"f{i}", "arguments": {}}} for i in "ab"]
    results = [{"role": "tool", "tool_call_id": i, "content": f"of {i}"} for i in "ba"]
    rows = [USER, {**CALL, "tool_calls": calls}, *results, ANSWER]
    read = read_row({"messages": rows}, pairs=False)[1]["messages"]
    assert [m["content"] for m in read if m["role"] == "tool"] == ["of a", "of b"]
    with pytest.raises(ChatError, match="tool_call_id"):
        read_row({"messages": [*rows[:2], {**results[0], "tool_call_id": "c"}, ANSWER]}, pairs=False)


def test_arguments_are_encoded_once(chats):
    city = {"city": 'the "old" town'}
    for arguments in (city, json.dumps(city)):
        call = {**CALL, "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}
        for name in ("qwen3", "llama31", "deepseek_calls"):
            text = chats[name][0].render([USER, call])
            assert json.dumps(city) in text, name


def test_variables_of_a_row_reach_the_template(tmp_path):
    source = "{{ 'on ' if enable_thinking else 'off ' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = make_folder(tmp_path, "chatml")
    chat = ChatTemplate(source, load_tokenizer(folder))
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"enable_thinking": True}}
    read = read_row(row, pairs=False)[1]
    [sample] = render_answers(chat, read["messages"], given=TemplateArguments((), read["variables"])).samples
    assert sample.text == "on hiyes<|im_end|>", "a layout without an end is followed by that of a text"


TURNS = [{"role": role, "content": f"{role} {i}"} for i in range(4) for role in ("user", "assistant")]
THOUGHT = {"role": "assistant", "content": "", "reasoning_content": "because"}
LOOP = [
    USER,
    *(
        message
        for i in range(3)
        for message in (
            {**THOUGHT, "tool_calls": [{"function": {"name": f"f{i}", "arguments": {}}}]},
            {"role": "tool", "content": f"result {i}"},
        )
    ),
    {**ANSWER, "reasoning_content": "so"},
]


@pytest.mark.parametrize(
    ("name", "talk", "rows"),
    [("phi3", TURNS, 1), ("llama31", TURNS, 1), ("qwen3", TURNS, 4), ("qwen3", LOOP, 1), ("gemma", TURNS, 1)],
)
def test_a_conversation_is_trained_once_where_its_beginnings_agree(tmp_path, name, talk, rows):
    """Ids and masks are those of rows of their own, one for each answer; what that saves is a number."""
    folder = make_folder(tmp_path, name)
    chat = ChatTemplate.load(str(folder), load_tokenizer(folder))
    answers = [i for i, message in enumerate(talk) if message["role"] == "assistant"]
    apart = []
    for i in answers:
        only = [{**m, "weight": 0} if m["role"] == "assistant" and n != i else m for n, m in enumerate(talk[: i + 1])]
        [sample] = render_answers(chat, only).samples
        last = int(np.flatnonzero(sample.trained_T)[-1]) + 1
        apart.append((sample.ids_T[:last].tolist(), sample.trained_T[:last]))
    together = render_answers(chat, talk).samples
    assert len(together) == rows
    for sample in together:
        union = np.zeros(len(sample.ids_T), bool)
        for ids, trained in [one for one in apart if sample.ids_T[: len(one[0])].tolist() == one[0]]:
            union[: len(ids)] |= trained
        assert (union == sample.trained_T).all()
    assert sum(int(trained.sum()) for _, trained in apart) == sum(int(s.trained_T.sum()) for s in together)
    ends = [int(np.flatnonzero(s.trained_T)[-1]) + 1 for s in together]
    assert sum(s.saved for s in together) == sum(len(ids) for ids, _ in apart) - sum(ends)


def test_pairs_in_the_formats_of_other_tools_say_the_same():
    """OpenAI's, TRL's, LLaMA-Factory's two."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    system, other = {"role": "system", "content": "be kind"}, {"role": "assistant", "content": "no"}
    sharegpt = {"from": "gpt", "value": "yes"}, {"from": "gpt", "value": "no"}
    rows = [
        {
            "input": {"messages": [system, USER], "tools": tools, "parallel_tool_calls": True},
            "preferred_output": [ANSWER],
            "non_preferred_output": [other],
        },
        {"prompt": [system, USER], "chosen": [ANSWER], "rejected": [other], "tools": tools},
        {"chosen": [system, USER, ANSWER], "rejected": [system, USER, other], "tools": json.dumps(tools)},
        {
            "conversations": [{"from": "human", "value": "hi"}],
            "chosen": sharegpt[0],
            "rejected": sharegpt[1],
            "system": "be kind",
            "tools": json.dumps([{"name": "f"}]),
        },
        {"instruction": "hi", "input": "", "chosen": "yes", "rejected": "no", "system": "be kind", "tools": tools},
    ]
    expected = {"prompt": [system, USER], "chosen": [ANSWER], "rejected": [other], "tools": tools}
    assert [read_row(row, pairs=True) for row in rows] == [("preferences", expected)] * 5


@pytest.mark.parametrize("weight", [1, 1.0, "1", True])
def test_a_row_of_weight_1_is_as_any_other(weight):
    assert read_row({"messages": [USER, ANSWER], "weight": weight}, pairs=False)[1] == {"messages": [USER, ANSWER]}

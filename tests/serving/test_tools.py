"""Tools: calls in three formats however the text comes in pieces, over HTTP and in streams, and played back."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat import families
from tests.draws import examples
from tests.serving.scripted import scripted
from tests.serving.served import NAME, post, serving
from tests.serving.streams import events
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.tools import TemplateArguments
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.serving.api.tool_calls import TOKENS, CallParser, format_of

CHAT = "/v1/chat/completions"
NAMES = ("weather", "f")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "about Paris", "parameters": SCHEMA}}
    for name in NAMES
]
TALK = [{"role": "user", "content": "weather in Paris?"}]

_MISTRAL = """\
{{- bos_token }}{% if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be 9 characters') }}{% endif %}
            {{- call.function | tojson }}
        {%- endfor %}{{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- message.content + eos_token }}{% endif %}
{%- endfor %}"""
_QWEN = "{% if tools %}{{ '<tools>' + (tools | tojson) + '</tools>' }}{% endif %}" + families.FAMILIES["qwen3"].template
FAMILIES = {
    "hermes": (_QWEN, families.FAMILIES["qwen3"]),
    "llama3": (families.FAMILIES["llama31"].template, families.FAMILIES["llama31"]),
    "mistral": (_MISTRAL, families.FAMILIES["mistral"]),
}


def said(kind, calls):
    """What a model writes for calls (name, arguments)."""
    key = "parameters" if kind == "llama3" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    if kind == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if kind == "glm":
        return "\n".join(f"<tool_call>{name}\n{_pairs(given, GLM)}</tool_call>" for name, given in calls)
    if kind == "qwen3_coder":
        wrapped = [f"<function={name}>\n{_pairs(given, CODER)}</function>" for name, given in calls]
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in wrapped)
    if kind.startswith("deepseek"):
        bodies = [
            f"{name}<｜tool▁sep｜>{json.dumps(given)}" if kind == "deepseek31" else
            f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(given)}\n```"
            for name, given in calls
        ]  # fmt: skip
        inner = "\n".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"
    return "; ".join(objects) if kind == "llama3" else f"[TOOL_CALLS][{', '.join(objects)}]"


GLM = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
CODER = "<parameter={}>\n{}\n</parameter>\n"


def _pairs(given, form):
    """Arguments as texts; only those of the type string are no JSON."""
    return "".join(form.format(k, v if isinstance(v, str) else json.dumps(v)) for k, v in given.items())


def parsed(kind, pieces, schemas=None):
    parser, text, calls = CallParser(kind.removesuffix("31"), NAMES, schemas), "", []
    for found in [*map(parser.push, pieces), parser.flush()]:
        text += found.text
        calls += [(call.name, json.loads(call.arguments)) for call in found.calls]
    return text, calls


def in_pieces(text, cuts):
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('a<}]"[;é🦊\n', max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text("xy", min_size=1), VALUES)), max_size=3)


@examples(150)
@given(st.sampled_from(sorted(FAMILIES)), CALLS, st.text("Yes <t[T", max_size=9), st.lists(st.integers(0, 400)))
def test_calls_and_text_however_they_are_cut(kind, calls, before, cuts):
    before = before if kind != "llama3" else ""
    before = before.rstrip("<t[T ")  # else it is the beginning of a mark
    whole = before + (said(kind, calls) if calls else "")
    text, found = parsed(kind, in_pieces(whole, cuts))
    assert found == calls
    assert text.strip() == before.strip()


@examples(150)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", '{"name": "weather"}', '{"name": "g"}',
         "Yes", " ", "\n", ";", "[", "]", "<tool", '"', "1", "weather"]), max_size=8),
    st.lists(st.integers(0, 99)),
)  # fmt: skip
def test_nothing_is_lost_of_what_is_no_call(kind, parts, cuts):
    """All that is said comes out, as text or as a call with a name that there is."""
    whole = "".join(parts)
    text, calls = parsed(kind, in_pieces(whole, cuts))
    assert (text, calls) == parsed(kind, [whole])
    if not calls:
        assert text == whole
    assert all(name in NAMES for name, _ in calls)


DEEPSEEK = TOKENS["deepseek"]
PLAIN = st.text('xy é0{["', max_size=6).filter(lambda text: text == text.strip())
TYPED = st.dictionaries(st.sampled_from(["s1", "s2", "j1", "j2"]), st.none(), max_size=4).flatmap(
    lambda keys: st.fixed_dictionaries({key: PLAIN if key.startswith("s") else VALUES for key in keys})
)
STRINGS = {"type": "object", "properties": {"s1": {"type": "string"}, "s2": {"anyOf": [{"type": "string"}]}}}


@examples(200)
@given(
    st.sampled_from(["glm", "qwen3_coder", "deepseek", "deepseek31"]),
    st.lists(st.tuples(st.sampled_from(NAMES), TYPED), max_size=3),
    st.sampled_from(["", "Yes. ", "Yes <to"]),
    st.lists(st.integers(0, 400)),
)
def test_calls_of_other_formats_however_they_are_cut(kind, calls, before, cuts):
    """Texts stay texts where the schema says so: "0" is no number."""
    calls = [
        (name, {k: v for k, v in given.items() if k.startswith("s") or not isinstance(v, str)}) for name, given in calls
    ]
    whole = before + (said(kind, calls) if calls else "")
    text, found = parsed(kind, in_pieces(whole, cuts), dict.fromkeys(NAMES, STRINGS))
    assert found == calls
    assert text.strip() == before.strip()


@examples(200)
@given(
    st.sampled_from(["glm", "qwen3_coder", "deepseek"]),
    st.lists(st.sampled_from(
        ["<tool_call>", "</tool_call>", "weather", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\n",
         "<function=", ">", "f", "</function>", "<parameter=", "</parameter>", *DEEPSEEK, "{}", "<｜t"]), max_size=9),
    st.lists(st.integers(0, 99)),
)  # fmt: skip
def test_nothing_is_lost_of_what_is_no_call_in_other_formats(kind, parts, cuts):
    whole = "".join(parts)
    text, calls = parsed(kind, in_pieces(whole, cuts))
    assert (text, calls) == parsed(kind, [whole])
    if not calls:
        assert text == whole
    assert all(name in NAMES for name, _ in calls)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text("a\ud83d\udd8a", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("a\ud83d", max_size=2), inner, max_size=2),
    max_leaves=4,
)


def written(kind, name, arguments):
    """A call as a model writes it, the name and arguments being any JSON, or what Python takes for JSON."""
    value, key = json.dumps(arguments), "parameters" if kind == "llama3" else "arguments"
    whole = json.dumps({"name": name, key: arguments})
    return {
        "hermes": f"<tool_call>{whole}</tool_call>",
        "llama3": whole,
        "mistral": f"[TOOL_CALLS][{whole}]",
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value></tool_call>",
        "qwen3_coder": f"<tool_call><function=f><parameter=a>\n{value}\n</parameter></function></tool_call>",
        "deepseek": f"{DEEPSEEK[0]}{DEEPSEEK[2]}f{DEEPSEEK[4]}{value}{DEEPSEEK[3]}{DEEPSEEK[1]}",
    }[kind]


@examples(200)
@given(
    st.sampled_from([*FAMILIES, "glm", "qwen3_coder", "deepseek"]),
    st.just("f") | ODD,
    ODD,
    st.lists(st.integers(0, 99)),
)
def test_whatever_json_a_model_writes_can_be_sent(kind, name, arguments, cuts):
    """Names that are no names, halves of surrogate pairs, and numbers that JSON does not have."""
    whole = written(kind, name, arguments)
    parser, text, calls = CallParser(kind, NAMES), "", []
    for found in [*map(parser.push, in_pieces(whole, cuts)), parser.flush()]:
        text, calls = text + found.text, calls + found.calls
    assert calls or text == whole
    for call in calls:
        assert json.dumps(call.to_json(), ensure_ascii=False).encode()
        assert call.name == "f"
        if not isinstance(arguments, str):
            json.loads(call.arguments, parse_constant=pytest.fail)


def test_arguments_that_are_nested_without_end_are_text():
    whole = '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}</tool_call>"
    assert parsed("hermes", [whole]) == (whole, [])


def test_values_without_a_schema_are_json_or_text():
    whole = said("glm", [("f", {"a": "x", "b": 1, "c": [True]})]).replace("[true]", "True")
    assert parsed("glm", [whole]) == ("", [("f", {"a": "x", "b": 1, "c": True})])


def test_a_call_that_is_cut_off_or_names_nothing_is_text():
    for whole in ('<tool_call>{"name": "weather", "arg', '<tool_call>{"name": "g", "arguments": {}}</tool_call>'):
        assert parsed("hermes", [whole]) == (whole, [])
    assert parsed("mistral", ['[TOOL_CALLS]weather[ARGS]{"city": "Paris"}']) == ("", [("weather", {"city": "Paris"})])
    assert parsed("llama3", ['<|python_tag|>{"name": "f", "parameters": {}}']) == ("", [("f", {})])
    assert parsed("llama3", ["{}"]) == ("{}", [])


@examples(100)
@given(
    st.sampled_from(["hermes", "mistral", "args"]),
    st.lists(
        st.sampled_from(["</tool_call>", "<tool_call>", "[TOOL_CALLS]", "[ARGS]", '"', "\\", "x", "\n"]), max_size=5
    ),
    st.lists(st.integers(0, 200)),
)
def test_marks_inside_of_an_argument_are_text_of_it(kind, parts, cuts):
    calls = [("f", {"a": "".join(parts)}), ("weather", {})]
    named = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}" for name, given in calls)
    whole = named if kind == "args" else said(kind, calls)
    text, found = parsed("mistral" if kind == "args" else kind, in_pieces(whole, cuts))
    assert (text.strip(), found) == ("", calls)


@examples(100)
@given(st.sampled_from([*FAMILIES, "args"]), VALUES, st.integers(0, 80))
def test_arguments_are_an_object_or_no_call(kind, value, cut):
    """Whatever stands in their place, and wherever the answer ends."""
    text = json.dumps(value)
    whole = f"[TOOL_CALLS]f[ARGS]{text}" if kind == "args" else said(kind, [("f", value)])
    for one in (whole, whole[:cut]):
        left, found = parsed("mistral" if kind == "args" else kind, [one])
        assert all(isinstance(given, dict) for _, given in found)
        assert found or left == one
    if isinstance(value, dict):
        assert parsed("mistral" if kind == "args" else kind, [whole]) == ("", [("f", value)])


def test_missing_arguments_are_none():
    assert parsed("mistral", ["[TOOL_CALLS]f[ARGS]"]) == ("", [("f", {})])
    assert parsed("hermes", ['<tool_call>{"name": "f", "arguments": null}</tool_call>']) == ("", [("f", {})])


TEXTS = {
    "reference": {"$ref": "#/$defs/Color"}, "of_a_reference": {"allOf": [{"$ref": "#/$defs/Color"}]},
    "values": {"enum": ["1", "2"]}, "one_value": {"const": "1"}, "all": {"allOf": [{"type": "string"}]},
    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}  # fmt: skip
OTHERS = {
    "to_itself": {"$ref": "#/$defs/Loop"}, "to_nothing": {"$ref": "#/$defs/None"}, "numbers": {"enum": [1, 2]},
    "number": {"type": "integer"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["glm", "qwen3_coder"])
def test_a_text_stays_one_however_its_schema_says_so(kind):
    """Pydantic writes a choice of texts as a reference."""
    defs = {"Color": {"type": "string", "enum": ["1", "2"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}}
    schemas = {"f": {"type": "object", "properties": TEXTS | OTHERS, "$defs": defs}}
    whole = said(kind, [("f", dict.fromkeys({**TEXTS, **OTHERS}, "1"))])
    want = dict.fromkeys(TEXTS, "1") | dict.fromkeys(OTHERS, 1)
    assert parsed(kind, [whole], schemas) == ("", [("f", want)])


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[NaN]"])
def test_what_json_cannot_say_is_text(value):
    assert parsed("glm", [said("glm", [("f", {"a": value})])]) == ("", [("f", {"a": value})])


def test_the_format_is_the_templates():
    assert {kind: format_of(source) for kind, (source, _) in FAMILIES.items()} == {kind: kind for kind in FAMILIES}
    assert format_of(families.FAMILIES["chatml"].template) is None
    assert format_of(families.FAMILIES["deepseek"].template) is None
    assert format_of("{{ tools }}<tool_call><function=x>") == "qwen3_coder"
    assert format_of("{{ tools }}<tool_call>{name}<arg_key>") == "glm"
    assert format_of("{{ tools }}<｜tool▁calls▁begin｜>") == "deepseek"


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request, tmp_path_factory):
    """A format, its tokenizer and template."""
    source, base = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    marks = ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[/TOOL_RESULTS]")
    special = (*base.special, *(marks if request.param == "mistral" else ()))
    with pytest.MonkeyPatch.context() as patch:
        changed = families.Family(source, special, base.added, base.named)
        patch.setitem(families.FAMILIES, "changed", changed)
        families.make_folder(folder, "changed")
    tokenizer = load_tokenizer(folder)
    return request.param, tokenizer, ChatTemplate.load(str(folder), tokenizer)


def says(family, text, messages=TALK, tools=TOOLS):
    """A session whose model answers these messages with a text, its control tokens as tokens."""
    _, tokenizer, template = family
    prompt = template.encode(messages, True, TemplateArguments(tools))
    parts = re.split(r"(\[TOOL_CALLS\])", text)
    ids = [
        i
        for part in parts
        for i in ([tokenizer.backend.token_to_id(part)] if part == "[TOOL_CALLS]" else tokenizer.encode(part))
    ]
    return scripted([*ids, tokenizer.eos_id], tokenizer, template, prompt=len(prompt))


ASK = {"model": NAME, "messages": TALK, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
ONE = [("weather", {"city": "Paris"})]
TWO = [*ONE, ("f", {"city": "é 42!"})]


@pytest.mark.parametrize("calls", [ONE, TWO])
def test_calls_over_http_streamed_or_not(family, calls):
    kind = family[0]
    with serving(says(family, said(kind, calls))) as (port, _):
        status, content, _ = post(port, CHAT, ASK)
        assert status == 200, content
        (choice,) = content["choices"]
        told = choice["message"]["tool_calls"]
        assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in told] == calls
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert len({one["id"] for one in told}) == len(calls)
        assert all(one["type"] == "function" for one in told)
        streamed = [part["choices"][0] for part in events(port, CHAT, ASK | {"stream": True})]
        deltas = [call for part in streamed for call in part["delta"].get("tool_calls", [])]
        begins = [delta for delta in deltas if "id" in delta]
        assert [delta["index"] for delta in begins] == list(range(len(calls)))
        assert all(delta["function"]["arguments"] == "" and delta["type"] == "function" for delta in begins)
        assert all(delta["function"].keys() == {"arguments"} for delta in deltas if "id" not in delta)
        given = ["".join(d["function"]["arguments"] for d in deltas if d["index"] == i) for i in range(len(calls))]
        assert [(b["function"]["name"], json.loads(g)) for b, g in zip(begins, given, strict=True)] == calls
        assert streamed[-1]["finish_reason"] == "tool_calls"
        assert not any(part["delta"].get("content", "").strip() for part in streamed)
        first = post(port, CHAT, ASK | {"parallel_tool_calls": False})[1]["choices"][0]
        assert len(first["message"]["tool_calls"]) == 1
        assert first["finish_reason"] == "tool_calls"


def test_an_answer_that_is_cut_off_behind_a_call_says_so(family):
    """Streamed or not; of a format whose calls are known before the end of the answer."""
    kind, tokenizer, _ = family
    if kind != "hermes":
        pytest.skip("its calls are read at the end of the answer")
    whole = said(kind, TWO)
    most = len(tokenizer.encode(whole[: whole.index("</tool_call>") + len("</tool_call>\n<tool_call>")]))
    with serving(says(family, whole)) as (port, _):
        asked = ASK | {"max_tokens": most}
        (choice,) = post(port, CHAT, asked)[1]["choices"]
        streamed = [part["choices"][0] for part in events(port, CHAT, asked | {"stream": True})]
        only = post(port, CHAT, asked | {"parallel_tool_calls": False})[1]["choices"][0]
    assert choice["finish_reason"] == streamed[-1]["finish_reason"] == "length"
    assert only["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


def test_a_call_and_its_result_are_played_back(family):
    kind = family[0]
    with serving(says(family, said(kind, ONE))) as (port, _):
        message = post(port, CHAT, ASK)[1]["choices"][0]["message"]
    dumped = message | {"annotations": None, "audio": None, "function_call": None, "refusal": None}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42!"}
    played = [*TALK, dumped, result]
    like = [
        *TALK,
        {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]},
        {**result, "name": "weather"},
    ]
    with serving(says(family, "Yes, 42!", like)) as (port, _):
        status, content, _ = post(port, CHAT, ASK | {"messages": played})
        assert status == 200, content
        assert content["choices"][0]["message"]["content"] == "Yes, 42!"
        assert content["choices"][0]["finish_reason"] == "stop"
    text = family[2].render(like, True, TemplateArguments(TOOLS))
    assert '"city": "Paris"' in text


def test_text_without_a_call_is_content(family):
    with serving(says(family, "Yes, Paris!")) as (port, _):
        choice = post(port, CHAT, ASK)[1]["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes, Paris!", "stop")
        assert "tool_calls" not in choice["message"]
        status, content, _ = post(port, CHAT, ASK | {"tool_choice": {"type": "function", "function": {"name": "g"}}})
        assert (status, content["error"]["param"]) == (400, "tool_choice")


def test_no_tools_are_shown_where_none_may_be_called(family):
    kind = family[0]
    with serving(says(family, said(kind, ONE), tools=())) as (port, _):
        choice = post(port, CHAT, ASK | {"tool_choice": "none"})[1]["choices"][0]
        assert "tool_calls" not in choice["message"]


def test_a_template_without_tools_refuses_them(tmp_path):
    folder = families.make_folder(tmp_path, "chatml")
    tokenizer = load_tokenizer(folder)
    session = scripted([tokenizer.eos_id], tokenizer, ChatTemplate.load(str(folder), tokenizer))
    with serving(session) as (port, _):
        status, content, _ = post(port, CHAT, ASK)
        assert (status, content["error"]["param"]) == (400, "tools")

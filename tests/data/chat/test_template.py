"""Chat templates: text and ids equal those of transformers, masks those of a brute-force reference."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat.families import FAMILIES, make_folder
from tests.draws import examples
from tilewright.core.errors import ConfigError, DataError
from tilewright.data.chat.load import template_source
from tilewright.data.chat.template import ChatError, ChatTemplate
from tilewright.data.chat.trained_tokens import samples
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer

transformers = pytest.importorskip("transformers")

NAMES = tuple(FAMILIES)
CONTROL = {token for family in FAMILIES.values() for token in (*family.special, *family.added)}


def _is_plain(text: str) -> bool:
    """Hypothesis draws constants of the sources too, such as `<s>`: ours takes it as text, transformers as a token."""
    return bool(text.strip()) and not any(token in text for token in CONTROL)


TEXTS = st.one_of(
    st.sampled_from(
        [
            "hello",
            "Yes, no!",
            " led by a space",
            "ends in a line\n",
            "\nbegins with a line",
            "two\n\nparagraphs",
            "naïve 🦊 日本",
            "42",
            "<b>&amp;'\"",
            "[INST",
            "{{ bos_token }}",
            "assistant",
        ]
    ),
    st.text(st.characters(exclude_categories=("Cs", "Co", "Cn")), min_size=1, max_size=12).filter(_is_plain),
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Name -> (our template, transformers' tokenizer)."""
    root = tmp_path_factory.mktemp("families")
    found = {}
    for name in NAMES:
        folder = make_folder(root / name, name)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        found[name] = ChatTemplate.load(str(folder), load_tokenizer(folder)), theirs
    return found


@st.composite
def conversations(draw, name, thinking=("qwen3", "deepseek_r1")):
    turns = draw(st.integers(1, 4))
    messages = []
    if FAMILIES[name].system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    for _ in range(turns):
        messages.append({"role": "user", "content": draw(TEXTS)})
        answer = {"role": "assistant", "content": draw(TEXTS)}
        if name == "qwen3" and draw(st.booleans()):
            answer["reasoning_content"] = draw(TEXTS)
        if name in thinking and draw(st.booleans()):
            answer["content"] = f"<think>\n{draw(TEXTS)}\n</think>\n\n{answer['content']}"
        messages.append(answer)
    return messages


def _theirs(tokenizer, messages, prompt=False):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), prompt=st.booleans())
@examples(60)
def test_ids_are_those_of_apply_chat_template(chats, name, data, prompt):
    ours, theirs = chats[name]
    messages = data.draw(conversations(name))
    if prompt:
        messages = messages[:-1]
    assert ours.render(messages, prompt) == theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False
    )
    assert ours.encode(messages, prompt) == _theirs(theirs, messages, prompt)


END = {
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "mistral_first": "</s>",
    "gemma": "<end_of_turn>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
    "deepseek_calls": "<｜end▁of▁sentence｜>",
    "llama31": "<|eot_id|>",
    "phi3": "<|end|>",
    "glm4": "<|user|>",
    "zephyr": "</s>",
}
CLOSING = {"glm4": "<|user|>"}
"""What the layout writes only where another turn follows: training puts it behind the last answer."""


def _reference(name, theirs, messages):
    """Each answer alone: (ids of the rendering that ends with it, which of them are the answer's). Built from the
    families' layouts, not from our code: behind the prompt, up to the first end-of-turn token."""
    found = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = theirs.apply_chat_template(messages[: i + 1], tokenize=False) + CLOSING.get(name, "")
        prompt = theirs.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
        if not text.startswith(prompt):  # the R1 layout prompts for a thought that no history has
            prompt = prompt.removesuffix("<think>\n")
        end = text.rindex(END.get(name, "<|im_end|>")) + len(END.get(name, "<|im_end|>"))
        encoded = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [a < end and b > len(prompt) and a < b for a, b in encoded["offset_mapping"]]
        found.append((encoded["input_ids"], mask))
    return found


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@examples(60)
def test_each_answer_is_trained_once_where_it_stands_as_the_model_will_write_it(chats, name, data):
    ours, theirs = chats[name]
    messages = data.draw(conversations(name, thinking=("qwen3",)))
    expected = _reference(name, theirs, messages)
    found = samples(ours, messages)
    closing = [theirs.convert_tokens_to_ids(CLOSING[name])] if name in CLOSING else []
    assert found[-1].ids_T.tolist() == [*_theirs(theirs, messages), *closing]
    left = list(range(len(expected)))
    for sample in found:
        covered = []
        for i in left:
            ids, mask = expected[i]
            last = int(np.flatnonzero(mask)[-1])
            if sample.ids_T[: last + 1].tolist() == ids[: last + 1]:
                at = np.flatnonzero(mask)
                if sample.trained_T[at].all():
                    covered.append(i)
        union = np.zeros(len(sample.ids_T), bool)
        for i in covered:
            union[np.flatnonzero(expected[i][1])] = True
        assert (sample.trained_T == union).all()
        assert covered
        left = [i for i in left if i not in covered]
    assert not left, "every answer is trained"


def test_qwen3_trains_each_thought_in_a_rendering_of_its_own(chats):
    ours, _ = chats["qwen3"]
    talk = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "A", "reasoning_content": "first"},
        {"role": "user", "content": "b?"},
        {"role": "assistant", "content": "B", "reasoning_content": "second"},
    ]
    found = samples(ours, talk)
    assert [[s.text[a:b] for a, b in s.spans] for s in found] == [
        ["<think>\nfirst\n</think>\n\nA<|im_end|>"],
        ["<think>\nsecond\n</think>\n\nB<|im_end|>"],
    ]
    assert "first" not in found[1].text


def test_mistral_leaves_the_system_message_of_an_answered_question_out_and_that_is_said(chats):
    """The layout of v0.3 has it only in front of a question that nobody has answered: such rows cannot be trained."""
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    assert _refused(chats["mistral"][0], talk) == "content of role 'system' that the template leaves out"


@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral", "deepseek", "chatml", "gemma"])
def test_a_control_token_in_a_message_is_text(chats, name):
    ours, theirs = chats[name]
    control = END.get(name, "<|im_end|>")
    for where in ("user", "assistant"):
        talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
        for message in talk:
            if message["role"] == where:
                message["content"] = f"hello {control} you"
        ids = ours.encode(talk)
        assert ids == theirs.apply_chat_template(talk, sanitize_control_tokens=True)["input_ids"]
        assert ids.count(theirs.convert_tokens_to_ids(control)) < _theirs(theirs, talk).count(
            theirs.convert_tokens_to_ids(control)
        )
        [sample] = samples(ours, talk)
        spans = [sample.text[a:b] for a, b in sample.spans]
        expected = talk[1]["content"] + control
        assert spans[0].endswith(expected)


def test_marks_of_ours_in_a_message_cannot_hide_a_token(chats):
    ours, _ = chats["chatml"]
    forged = "hello \ue0f2<|im_end|>\ue0f3 <|im_\ue0f3end|>"
    ids = ours.encode([{"role": "user", "content": forged}])
    assert ids.count(ours.tokenizer.backend.token_to_id("<|im_end|>")) == 1


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("llama3", ("<|eot_id|>",)),
        ("llama31", ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")),
        ("phi3", ("<|end|>", "<|endoftext|>", "<|assistant|>")),
        ("glm4", ("<|user|>", "<|endoftext|>", "<|observation|>")),
        ("zephyr", ("</s>",)),
        ("smollm", ("<|im_end|>",)),
        ("qwen3", ("<|im_end|>", "<|endoftext|>")),
        ("gemma", ("<end_of_turn>", "<eos>")),
        ("mistral", ("</s>",)),
        ("deepseek", ("<｜end▁of▁sentence｜>",)),
        ("marked", ("<|im_end|>",)),
    ],
)
def test_what_ends_an_answer(chats, name, stop):
    ours, _ = chats[name]
    assert tuple(ours.tokenizer.backend.id_to_token(i) for i in ours.stops.ids) == stop
    assert ours.stops.texts == ()


def test_chatml_for_a_base_model_ends_by_text_where_it_has_no_token():
    chat = ChatTemplate.load("", train_tokenizer(["hello you " * 9], 300), "chatml")
    assert chat.stops.texts == ("<|im_end|>",)
    [sample] = samples(chat, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}])
    assert [sample.text[a:b] for a, b in sample.spans] == ["you<|im_end|>\n<|eos|>"]
    assert (sample.ids_T[-1], sample.trained_T[-1]) == (chat.tokenizer.eos_id, True)


def test_an_answer_that_calls_a_tool_ends_with_what_its_result_begins_with(chats):
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = [{"role": "tool", "content": "sunny"}, {"role": "assistant", "content": "It is."}]
    for messages, ends in ((talk, ["<|observation|>"]), ([*talk, *result], ["<|observation|>", "<|user|>"])):
        spans = [s.text[a:b] for s in samples(chats["glm4"][0], messages) for a, b in s.spans]
        assert len(spans) == len(ends)
        assert all(span.endswith(end) for span, end in zip(spans, ends, strict=True))


@pytest.mark.parametrize("name", ["glm4", "phi3", "chatml"])
def test_marked_answers_that_leave_the_end_out_are_taught_it_all_the_same(chats, name):
    ours, _ = chats[name]
    source = """{%- for m in messages %}{{- '<|user|>' if m.role == 'user' else '<|assistant|>' }}
{%- if m.role == 'assistant' %}{%- generation %}{{- m.content }}{%- endgeneration %}{%- else %}{{- m.content }}
{%- endif %}{{- END }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
    end = {"glm4": "", "phi3": "<|end|>", "chatml": "<|im_end|>"}[name]
    chat = ChatTemplate(source.replace("END", repr(end)), ours.tokenizer, ours.tokens)
    talk = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "aAbB", strict=True)]
    [sample] = samples(chat, talk)
    assert [sample.text[a:b] for a, b in sample.spans] == ["A" + (end or "<|user|>"), "B" + (end or "<|user|>")]


def _refused(chat, messages):
    with pytest.raises(ChatError) as caught:
        samples(chat, messages)
    return caught.value.reason


def test_what_a_template_cannot_do_is_refused_with_its_reason(chats):
    user, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}
    call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert _refused(chats["gemma"][0], [{"role": "system", "content": "s"}, user, answer]) == "template raises"
    assert _refused(chats["llama3"][0], [user]) == "no answer of the assistant"
    assert _refused(chats["llama3"][0], [user, call]) == "tool_calls of role 'assistant' that the template leaves out"
    assert "'tool'" in _refused(
        chats["deepseek"][0], [user, answer, {"role": "tool", "content": "result"}, {**answer, "content": "ok"}]
    )
    assert _refused(chats["chatml"][0], [user, {"role": "assistant"}]) == "template raises"
    assert _refused(chats["chatml"][0], [{"role": "user", "content": 3}, answer]) == "template raises"


def test_a_tool_call_that_the_template_knows_is_trained(chats):
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    talk = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    found = samples(chats["qwen3"][0], talk)
    spans = [s.text[a:b] for s in found for a, b in s.spans]
    assert any('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in text for text in spans)
    assert not any("sunny" in text and "It is" not in text for text in spans)


# ---- where a template comes from ----


def test_templates_are_found_where_transformers_finds_them(tmp_path):
    folder = make_folder(tmp_path / "a", "chatml", template=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "in the config"}))
    assert template_source("", str(folder))[0] == "in the config"
    several = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": several}))
    assert template_source("", str(folder))[0] == "d"
    assert template_source("rag", str(folder))[0] == "r"
    (folder / "chat_template.jinja").write_text("in a file")
    assert template_source("", str(folder))[0] == "in a file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert template_source(str(tmp_path / "mine.jinja"), str(folder))[0] == "mine"


def test_no_template_is_an_error_that_says_what_to_do(tmp_path):
    folder = make_folder(tmp_path, "chatml", template=False)
    with pytest.raises(ConfigError) as caught:
        ChatTemplate.load(str(folder), load_tokenizer(folder))
    assert 'data.chat_template = "chatml"' in caught.value.problems[0].try_
    with pytest.raises(ConfigError):
        template_source("nothing_here", str(folder))
    with pytest.raises(DataError, match="not valid jinja"):
        ChatTemplate("{% if %}", load_tokenizer(folder))
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="cannot be read"):
        template_source("", str(folder))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__['json'].codecs.open('/etc/passwd').read() }}",
        "{% set _ = messages.append(1) %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x }}",
    ],
)
def test_a_template_has_no_way_out_of_its_sandbox(source):
    chat = ChatTemplate(source, train_tokenizer(["hello you " * 9], 300))
    try:
        text = chat.render([{"role": "user", "content": "hello"}])
    except ChatError:
        return
    assert "class" not in text
    assert "root:" not in text

"""Thoughts are told apart from the answer however the text is cut, over HTTP, in streams, with the client's package."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.chat import families
from tests.draws import examples
from tests.serving.scripted import scripted
from tests.serving.served import NAME, post, serving
from tests.serving.streams import events
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.serving.api.thoughts import THOUGHT_MARKS, ThoughtParser
from tilewright.serving.token_text import ThoughtGate

CHAT = "/v1/chat/completions"
TALK = [{"role": "user", "content": "weather in Paris?"}]


def parsed(pieces, inside=False):
    parser, thought, text = ThoughtParser(inside), "", ""
    for found in [*map(parser.push, pieces), parser.flush()]:
        thought += found.thought
        text += found.text
    return thought, text


PARTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "</", "think>", "Yes", " ", "\n", "<", ">", "é"]), max_size=9
)


@examples(300)
@given(PARTS, st.booleans(), st.lists(st.integers(0, 60)))
def test_as_a_plain_search_has_it_however_it_is_cut(parts, inside, cuts):
    whole = "".join(parts)
    edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    found = parsed([whole[a:b] for a, b in itertools.pairwise(edges)], inside)
    begin = whole.lstrip(" \n")
    if inside or begin.startswith("<think>"):
        thought, mark, text = (whole if inside else begin.removeprefix("<think>")).partition("</think>")
        assert found == (thought.strip(" \n"), text.lstrip(" \n") if mark else "")
    else:
        assert found == ("", whole)


@examples(300)
@given(PARTS, st.booleans(), st.lists(st.integers(0, 60)))
def test_a_gate_gives_all_of_a_text_and_thoughts_with_their_marks(parts, inside, cuts):
    whole, gate = "".join(parts), ThoughtGate(THOUGHT_MARKS, inside)
    edges = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    found = [*(gate.push(whole[a:b]) for a, b in itertools.pairwise(edges)), gate.flush()]
    thought, behind = ("".join(side) for side in zip(*found, strict=True))
    assert thought + behind == whole
    begins = inside or whole.lstrip(" \n").startswith("<think>")
    end = whole.find("</think>", 0 if inside else whole.find("<think>"))
    assert len(thought) == (0 if not begins else len(whole) if end < 0 else end + len("</think>"))


def session_of(folder, text, messages=TALK):
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate.load(str(folder), tokenizer)
    prompt = template.encode(messages, True)
    return scripted([*tokenizer.encode(text), tokenizer.eos_id], tokenizer, template, prompt=len(prompt))


SAID = "<think>\nthe question is Paris\n</think>\n\nYes, 42!"
ASK = {"model": NAME, "messages": TALK, "temperature": 0, "max_tokens": 200}


def test_over_http_streamed_or_not(tmp_path):
    families.make_folder(tmp_path, "qwen3")
    with serving(session_of(tmp_path, SAID)) as (port, _):
        status, content, _ = post(port, CHAT, ASK)
        assert status == 200, content
        message = content["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("the question is Paris", "Yes, 42!")
        parts = [part["choices"][0]["delta"] for part in events(port, CHAT, ASK | {"stream": True})]
        assert "".join(delta.get("reasoning_content", "") for delta in parts) == "the question is Paris"
        assert "".join(delta.get("content") or "" for delta in parts) == "Yes, 42!"
        assert sum("reasoning_content" in delta for delta in parts) > 2, "thoughts come as they are drawn"
        short = post(port, CHAT, ASK | {"max_tokens": 8})[1]["choices"][0]
        assert short["finish_reason"] == "length"
        assert short["message"]["reasoning_content"]
        assert not short["message"]["content"]


def test_stop_strings_are_of_the_answer_and_not_of_its_thoughts(tmp_path):
    """A thought repeats the question: with stop strings, as lm-evaluation-harness sends, no answer would be left."""
    families.make_folder(tmp_path, "qwen3")
    with serving(session_of(tmp_path, SAID)) as (port, _):
        for stop in (["question", "42"], ["Paris", "\n\n4", "Yes, 4"], ["</think>", "!"]):
            choice = post(port, CHAT, ASK | {"stop": stop})[1]["choices"][0]
            assert choice["message"]["reasoning_content"] == "the question is Paris"
            content = SAID.partition("</think>\n\n")[2]
            assert choice["message"]["content"] == min((content.partition(one)[0] for one in stop), key=len)
            assert choice["finish_reason"] == "stop"
            parts = [part["choices"][0]["delta"] for part in events(port, CHAT, ASK | {"stop": stop, "stream": True})]
            assert "".join(delta.get("content") or "" for delta in parts) == choice["message"]["content"]


def test_an_answer_without_thoughts_has_none(tmp_path):
    families.make_folder(tmp_path, "qwen3")
    with serving(session_of(tmp_path, "Yes, <think> 42!")) as (port, _):
        message = post(port, CHAT, ASK)[1]["choices"][0]["message"]
    assert message["content"] == "Yes, <think> 42!"
    assert "reasoning_content" not in message


def test_the_clients_package_reads_them(tmp_path):
    openai = pytest.importorskip("openai")
    families.make_folder(tmp_path, "qwen3")
    with serving(session_of(tmp_path, SAID)) as (port, _):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", timeout=60)
        how = {"model": NAME, "messages": TALK, "temperature": 0, "max_tokens": 200}
        message = client.chat.completions.create(**how).choices[0].message
        assert message.reasoning_content == "the question is Paris"
        thought, text = "", ""
        for part in client.chat.completions.create(**how, stream=True):
            delta = part.choices[0].delta
            thought += getattr(delta, "reasoning_content", None) or ""
            text += delta.content or ""
        assert (thought, text) == ("the question is Paris", "Yes, 42!")
        played = [*TALK, message.model_dump(), {"role": "user", "content": "hello?"}]
        client.chat.completions.create(**how | {"messages": played, "max_tokens": 2})

"""Answers in a given form: JSON that keeps to its schema, calls that must be made, and words where that cannot be."""

import json
import sys

import pytest
import torch

from tests.cover import some
from tests.data.chat import families
from tests.serving.served import NAME, make_session, post, serving
from tests.serving.streams import events
from tests.serving.test_tools import TALK, TOOLS, family, says  # noqa: F401  a fixture
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.serving.api.tool_calls import CallParser
from tilewright.serving.grammar import Grammars
from tilewright.serving.http_server import Limits
from tilewright.serving.next_token import AnswerSettings
from tilewright.serving.session import Session

CHAT = "/v1/chat/completions"
ASK = {"model": NAME, "messages": TALK, "max_tokens": 200, "seed": 1}
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "place": {"enum": ["Paris", "é"]},
        "seen": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["count", "place", "seen"],
    "additionalProperties": False,
}


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return make_session(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def port(session):
    with serving(session, Limits(concurrent=4)) as (port, _):
        yield port


def test_without_the_package_the_answer_says_which_one(session, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with serving(session) as (port, _):
        for form in ({"type": "json_object"}, schema_format(SCHEMA)):
            status, content, _ = post(port, CHAT, ASK | {"response_format": form})
            assert (status, content["error"]["param"]) == (400, "response_format")
            assert "llguidance" in content["error"]["message"]
        assert post(port, CHAT, ASK | {"response_format": {"type": "text"}})[0] == 200


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_writes_what_the_schema_says(port, seed):
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    body = ASK | {"seed": seed, "temperature": 1.5, "response_format": schema_format(SCHEMA, strict=True)}
    status, content, _ = post(port, CHAT, body)
    assert status == 200, content
    (choice,) = content["choices"]
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert choice["finish_reason"] == "stop"
    streamed = events(port, CHAT, body | {"stream": True})
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in streamed) == choice["message"]["content"]


@pytest.mark.parametrize("seeds", [(0,), pytest.param(range(1, 6), marks=pytest.mark.slow)], ids=["one", "more"])
@pytest.mark.parametrize(
    "name", some(families.FAMILIES, "llama31", "phi3", "glm4", "mistral", "gemma", "deepseek", "chatml")
)
def test_every_tokenizer_writes_json_and_calls(name, seeds, tmp_path):
    """A model with random weights, some of its ids without a token, draws within a schema: whole characters, no space
    that the tokenizer puts before a text, and the end."""
    pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(families.make_folder(tmp_path, name))
    template = ChatTemplate.load(str(tmp_path), tokenizer)
    config = DecoderConfig.of(vocab_size=tokenizer.vocab_size + 13, dim=32, num_heads=2, num_layers=1)
    model = Decoder(config)
    init_weights(model, 0)
    session = Session(model, tokenizer, template, torch.device("cpu"), 2048)
    grammars = Grammars(tokenizer, session.stop_ids)
    schema = {"type": "object", "properties": {"place": {"enum": ["x", "é🦊"]}}, "required": ["place"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "w", "parameters": schema}}
    ids = session.chat_ids([{"role": "user", "content": "hello"}])
    for seed in seeds:
        settings = AnswerSettings(90, seed=seed)
        text = "".join(session.answer(ids, settings, turn=True, constraint=grammars.of_schema(schema)))
        assert json.loads(text)["place"] in ("x", "é🦊"), text
        for kind in ("hermes", "llama3", "mistral"):
            text = "".join(session.answer(ids, settings, turn=True, constraint=grammars.of_calls(kind, [tool])))
            parser = CallParser(kind, ["w"])
            (call,) = parser.push(text).calls + parser.flush().calls
            assert json.loads(call.arguments)["place"] in ("x", "é🦊"), text


def test_any_object(port):
    pytest.importorskip("llguidance")
    body = ASK | {"response_format": {"type": "json_object"}, "n": 2, "max_tokens": 240}
    for choice in post(port, CHAT, body)[1]["choices"]:
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    "schema",
    [{"type": 3}, {"properties": {"a": {"$ref": "#/nope"}}}, {"type": "string", "pattern": "("}, {"allOf": "x"}],
)
def test_a_schema_that_is_none_is_refused(port, schema):
    pytest.importorskip("llguidance")
    status, content, _ = post(port, CHAT, ASK | {"response_format": schema_format(schema)})
    assert (status, content["error"]["param"]) == (400, "response_format"), content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_that_must_be_made(family, choice):  # noqa: F811
    """Whatever the model would say, here text, its answer is a call."""
    pytest.importorskip("llguidance")
    with serving(says(family, "Yes, Paris!")) as (port, _):
        body = ASK | {"tools": TOOLS, "tool_choice": choice, "temperature": 0, "max_tokens": 60}
        status, content, _ = post(port, CHAT, body)
        assert status == 200, content
        (found,) = content["choices"]
        if found["finish_reason"] == "length":  # a scripted model never closes its string
            said = found["message"]["content"]
            assert '"name": "' + ("f" if isinstance(choice, dict) else "") in said
        else:
            names = [call["function"]["name"] for call in found["message"]["tool_calls"]]
            assert names == ["f"] if isinstance(choice, dict) else names[0] in ("weather", "f")

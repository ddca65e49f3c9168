"""Bodies as the `openai` package sent them (3.57, in recorded.jsonl), over plain HTTP: what needs no package to prove.

They hold what a message becomes when it is played back, tools made from pydantic classes, and every field by name.
"""

import importlib.util
import json
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.serving.served import make_session, post, serving
from tests.serving.streams import events
from tests.serving.test_tools import _QWEN
from tilewright.data.chat.template import ChatTemplate

RECORDED = [json.loads(line) for line in (Path(__file__).parent / "recorded.jsonl").read_text().splitlines()]
HEADERS = {
    "accept": "application/json", "authorization": "Bearer none", "user-agent": "OpenAI/Python 3.57.0",
    "x-stainless-lang": "python", "x-stainless-retry-count": "0", "x-stainless-read-timeout": "600",
}  # fmt: skip


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    session = make_session(tmp_path_factory.mktemp("model") / "model")
    template = ChatTemplate(_QWEN, session.tokenizer, session.chat.tokens)
    with serving(replace(session, chat=template, max_positions=4096)) as (port, _):
        yield port


@pytest.mark.parametrize("one", RECORDED, ids=range(len(RECORDED)))
def test_what_the_package_sends_is_answered(port, one):
    path, body = one["path"], {"seed": 1} | one["body"]
    if one["needs"] == "grammar" and importlib.util.find_spec("llguidance") is None:
        status, content, _ = post(port, path, body)
        assert (status, content["error"]["param"] in ("response_format", "tool_choice")) == (400, True)
        return
    if body.get("stream"):
        parts = events(port, path, body)
        assert {part["object"] for part in parts} == {"chat.completion.chunk" if "chat" in path else "text_completion"}
        return
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), HEADERS | {"content-type": "application/json"})
    answer = connection.getresponse()
    content = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, content
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [0]
    assert len(content["choices"]) == body.get("n", 1) * len(prompts)
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(content)


def test_all_fields_are_in_what_is_recorded():
    """A field that is added to requests has to be sent by one of them, or it is not the package's."""
    from tilewright.serving.api.requests import ChatRequest, TextRequest

    sent = {key for one in RECORDED for key in one["body"]}
    assert set(ChatRequest.model_fields) | set(TextRequest.model_fields) <= sent

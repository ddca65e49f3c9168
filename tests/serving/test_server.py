"""The server against the `openai` package: answers, streams, many clients, limits, and everything wrong."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serving.served import NAME, make_batch, make_session, post, serving
from tilewright.models.sampling import Sampling
from tilewright.serving.answer import AnswerPiece
from tilewright.serving.http_server import Limits
from tilewright.serving.next_token import AnswerSettings

openai = pytest.importorskip("openai")

TALK = [{"role": "user", "content": "hello Paris"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"model": NAME, "messages": TALK, "max_tokens": 8}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return make_session(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def port(session):
    with serving(session, Limits(concurrent=3, waiting=16, body_bytes=4000, body_seconds=0.5)) as (port, _):
        yield port


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def direct(session, seed, tokens=24, stop=()):
    """What the session gives without a server."""
    answer = session.answer(session.chat_ids(TALK), AnswerSettings(tokens, Sampling(), stop, seed), turn=True)
    return "".join(answer), answer


def test_chat_streamed_or_not_is_what_the_session_gives(client, session):
    for seed in range(3):
        text, answer = direct(session, seed)
        options = {"model": NAME, "messages": TALK, "max_tokens": 24, "seed": seed}
        whole = client.chat.completions.create(**options)
        assert whole.choices[0].message.content == text
        assert whole.choices[0].finish_reason == answer.finish_reason
        assert whole.usage.completion_tokens == answer.num_tokens
        assert whole.usage.prompt_tokens == len(session.chat_ids(TALK))
        parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
        assert parts[-1].usage == whole.usage
        assert parts[-2].choices[0].finish_reason == answer.finish_reason


def test_stop_strings_and_completions(client, session):
    text, _ = direct(session, 1)
    stop = text[4:7]
    options = {"model": NAME, "messages": TALK, "max_completion_tokens": 24, "seed": 1, "stop": [stop]}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == text[: text.find(stop)]
    assert whole.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**options, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in streamed) == text[: text.find(stop)]
    options = {"model": NAME, "max_tokens": 9, "seed": 2}
    written = client.completions.create(prompt="hello you", **options)
    assert (
        written.choices[0].text
        == client.completions.create(prompt=session.text_ids("hello you"), **options).choices[0].text
    )
    assert (
        "".join(p.choices[0].text for p in client.completions.create(prompt="hello you", stream=True, **options))
        == written.choices[0].text
    )


def test_models_and_health(client, port):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_eight_clients_at_once_get_their_own_answers(port, session):
    def ask(seed):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        return (
            client.chat.completions.create(model=NAME, messages=TALK, max_tokens=24, seed=seed)
            .choices[0]
            .message.content
        )

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(16)))
    assert found == [direct(session, seed)[0] for seed in range(16)]


DEEP = b'{"model":' + b"[" * 1500 + b"]" * 1500 + b"}"
WRONG = [
    (CHAT, b"{", 400), (CHAT, b"", 400), (CHAT, b"[]", 400), (CHAT, b"\xff\xfe", 400), (CHAT, DEEP, 400),
    (CHAT, {"messages": TALK}, 400), (CHAT, {"model": NAME}, 400), (CHAT, ASK | {"messages": []}, 400),
    (CHAT, ASK | {"messages": "hello"}, 400), (CHAT, ASK | {"messages": [{"role": "user"}]}, 400),
    (CHAT, ASK | {"messages": [{"role": "user", "content": None}]}, 400),
    (CHAT, ASK | {"messages": [{"role": "wizard", "content": "x"}]}, 400),
    (CHAT, ASK | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
    (CHAT, ASK | {"messages": [{"role": "user", "content": "hello Paris " * 200}]}, 400),
    (CHAT, json.dumps(ASK).replace("hello", "\\ud800").encode(), 400),
    (CHAT, ASK | {"model": "gpt-4o"}, 404), (CHAT, ASK | {"model": 3}, 400),
    (CHAT, json.dumps(ASK)[:-1].encode() + b', "temperature": NaN}', 400),
    (CHAT, json.dumps(ASK)[:-1].encode() + b', "temperature": 1e999}', 400),
    (CHAT, ASK | {"temperature": -1}, 400), (CHAT, ASK | {"temperature": "hot"}, 400), (CHAT, ASK | {"top_p": 0}, 400),
    (CHAT, ASK | {"max_tokens": 0}, 400), (CHAT, ASK | {"max_tokens": 10**9}, 400),
    (CHAT, ASK | {"max_tokens": 2.5}, 400),
    (CHAT, ASK | {"seed": 2**70}, 400), (CHAT, ASK | {"stop": [""]}, 400), (CHAT, ASK | {"stop": ["a"] * 99}, 400),
    (CHAT, ASK | {"n": 999}, 400), (CHAT, ASK | {"top_logprobs": 2}, 400), (CHAT, ASK | {"tools": [{}]}, 400),
    (CHAT, ASK | {"response_format": {"type": "xml"}}, 400), (CHAT, ASK | {"no_such_field": 1}, 400),
    (CHAT, ASK | {"stream": "yes"}, 400), (CHAT, ASK | {"stream_options": {"include_usage": True}}, 400),
    (CHAT, b" " * 5000, 413), (TEXT, {"model": NAME, "prompt": ["a", 3]}, 400),
    (TEXT, {"model": NAME, "prompt": [999999]}, 400),
    (TEXT, {"model": NAME, "prompt": []}, 400), ("/v1/nothing", ASK, 404), ("/v1/models", ASK, 405),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status"), WRONG)
def test_everything_wrong_is_told_in_openais_shape(port, path, body, status):
    found, content, _ = post(port, path, body)
    assert (found, set(content)) == (status, {"error"}), content
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert content["error"]["message"]


def test_fields_that_change_nothing_are_accepted(port):
    neutral = {"user": "me", "n": 1, "logit_bias": {}, "frequency_penalty": 0.0, "metadata": {"a": "b"}, "top_k": 5}
    assert post(port, CHAT, ASK | neutral)[0] == 200
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " Paris"}]
    assert post(port, CHAT, ASK | {"messages": [{"role": "developer", "content": parts}]})[0] == 200
    assert post(port, CHAT, ASK, content_type="text/plain")[0] == 415


def test_a_slow_body_is_ended(port):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_key_is_asked_for(session):
    with serving(session, key="secret") as (port, _):
        assert post(port, CHAT, ASK)[0] == 401
        assert post(port, CHAT, ASK, authorization="Bearer wrong")[0] == 401
        assert post(port, CHAT, ASK, authorization="Bearer secret")[0] == 200
        right = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret")
        assert right.models.list().data


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("streamed", [True, False])
def test_places_are_limited_and_a_client_that_leaves_frees_its_own(session, streamed):
    slow = Slow(make_batch(session, 1))
    with serving(session, Limits(concurrent=1, waiting=0), draws=slow) as (port, worker):
        raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        body = json.dumps(ASK | {"stream": streamed, "max_tokens": 200}).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        raw.sendall(head.encode() + body)
        wait_for(lambda: worker.load() == (1, 0))
        status, content, headers = post(port, CHAT, ASK)
        assert (status, content["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
        raw.close()
        wait_for(lambda: worker.load() == (0, 0))
        assert post(port, CHAT, ASK)[0] == 200


def test_time_ends_an_answer(session):
    with serving(session, Limits(seconds=0.6), draws=Slow(make_batch(session, 1))) as (port, _):
        status, content, _ = post(port, CHAT, ASK | {"max_tokens": 200})
    assert status == 200
    assert content["choices"][0]["finish_reason"] == "length"


class Slow:
    """Draws whose long answers have no end, and pause before each token."""

    def __init__(self, draws):
        self._draws = draws

    def __getattr__(self, name):
        return getattr(self._draws, name)

    def step(self, answers):
        slow = [answer for answer in answers if answer.max_tokens > 100]
        if slow:
            time.sleep(0.02)
        return [(answer, AnswerPiece("")) for answer in slow] + self._draws.step(
            [one for one in answers if one not in slow]
        )

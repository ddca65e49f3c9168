"""Fields of requests, each by its effect: what the `openai` package sends, and errors that name the field."""

import json
import math

import pytest

from tests.serving.served import NAME, make_session, post, serving
from tilewright.models.sampling import Sampling
from tilewright.serving.http_server import Limits
from tilewright.serving.next_token import AnswerSettings

openai = pytest.importorskip("openai")

TALK = [{"role": "user", "content": "hello Paris"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"model": NAME, "messages": TALK, "max_tokens": 8, "seed": 3}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return make_session(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def port(session):
    with serving(session, Limits(concurrent=4, waiting=16)) as (port, _):
        yield port


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def text_of(port, **changes):
    status, content, _ = post(port, CHAT, ASK | changes)
    assert status == 200, content
    return content["choices"][0]["message"]["content"]


def test_n_choices_are_those_of_seeds_that_follow(client):
    options = {"model": NAME, "messages": TALK, "max_tokens": 12}
    three = client.chat.completions.create(**options, seed=5, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    each = [client.chat.completions.create(**options, seed=5 + i) for i in range(3)]
    assert [c.message.content for c in three.choices] == [one.choices[0].message.content for one in each]
    assert three.usage.completion_tokens == sum(one.usage.completion_tokens for one in each)
    assert three.usage.prompt_tokens == each[0].usage.prompt_tokens
    texts = ["", "", ""]
    reasons = [None] * 3
    for part in client.chat.completions.create(**options, seed=5, n=3, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in three.choices]
    assert reasons == [choice.finish_reason for choice in three.choices]


def test_prompts_in_a_list_are_those_alone_and_echo_repeats_them(client, session):
    options = {"model": NAME, "max_tokens": 6, "seed": 2}
    prompts = ["hello you", "weather in Paris", "No"]
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    listed = client.completions.create(prompt=prompts, n=2, **options)
    assert [choice.text for choice in listed.choices][::2] == alone
    assert len(listed.choices) == 6
    ids = [session.text_ids(prompt) for prompt in prompts]
    assert [choice.text for choice in client.completions.create(prompt=ids, **options).choices] == alone
    echoed = client.completions.create(prompt=prompts, echo=True, **options)
    assert [choice.text for choice in echoed.choices] == [p + text for p, text in zip(prompts, alone, strict=True)]
    streamed = ["", "", ""]
    for part in client.completions.create(prompt=prompts, echo=True, stream=True, **options):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == [choice.text for choice in echoed.choices]


def logits_after(session, ids):
    import torch

    return session.model.next_token_logits(torch.tensor([ids]))[0].detach()


def test_logprobs_are_those_of_the_model(client, session):
    options = {"model": NAME, "messages": TALK, "max_tokens": 8, "seed": 1, "temperature": 0.5}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) >= whole.usage.completion_tokens > 0
    ids = session.chat_ids(TALK)
    backend = session.tokenizer.backend
    for told in content:
        logprobs = logits_after(session, ids).log_softmax(-1)
        best = logprobs.topk(3)
        assert [top.logprob for top in told.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        near = [i for i in range(len(logprobs)) if abs(float(logprobs[i]) - told.logprob) < 1e-4]
        named = [i for i in near if backend.decode([i]) == told.token or told.token == backend.id_to_token(i)]
        assert named, told
        assert bytes(told.bytes).decode("utf-8", "replace") == told.token
        ids = [*ids, named[0]]
    assert (
        b"".join(bytes(told.bytes) for told in content).decode("utf-8", "replace") == whole.choices[0].message.content
    )
    streamed = []
    for part in client.chat.completions.create(**options, logprobs=True, top_logprobs=3, stream=True):
        streamed += part.choices[0].logprobs.content if part.choices[0].logprobs else []
    assert [(one.token, one.logprob) for one in streamed] == [(one.token, one.logprob) for one in content]


def test_logprobs_of_completions(client):
    whole = client.completions.create(model=NAME, prompt="hello", max_tokens=5, seed=4, logprobs=2)
    found = whole.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
    assert all(
        len(top) <= 2 and value <= 0 for top, value in zip(found.top_logprobs, found.token_logprobs, strict=True)
    )


def drawn(session, settings):
    answer = session.answer(session.chat_ids(TALK), settings, turn=True)
    return "".join(answer)


def test_penalties_biases_and_min_p_change_what_is_drawn(port, session):
    greedy = {"temperature": 0, "max_tokens": 24}
    plain = text_of(port, **greedy)
    assert text_of(port, **greedy, frequency_penalty=2.0) == drawn(
        session, AnswerSettings(24, Sampling(0), frequency_penalty=2.0)
    )
    assert text_of(port, **greedy, presence_penalty=2.0) != plain
    ids = session.tokenizer.encode("hello")
    forced = text_of(port, temperature=0, max_tokens=3, logit_bias={str(ids[0]): 100})
    assert forced == session.tokenizer.decode(ids[:1] * 3)
    assert text_of(port, temperature=2, min_p=1.0, max_tokens=24) == plain
    assert text_of(port, temperature=2, top_k=1, max_tokens=24) == plain


def test_max_tokens_up_to_the_context_and_the_newer_name(port):
    status, content, _ = post(port, CHAT, ASK | {"max_tokens": 256})
    assert status == 200, content
    assert content["usage"]["total_tokens"] <= 256
    del (body := dict(ASK))["max_tokens"]
    for field in ("max_tokens", "max_completion_tokens"):
        status, content, _ = post(port, CHAT, body | {field: 257})
        assert (status, content["error"]["param"]) == (400, field)
    assert post(port, CHAT, body | {"max_completion_tokens": 3})[1]["usage"]["completion_tokens"] <= 3


def test_what_an_answer_becomes_when_it_is_played_back(client, port):
    """`model_dump` of the package has all fields, most of them None; so have messages that other clients made."""
    first = client.chat.completions.create(model=NAME, messages=TALK, max_tokens=8, seed=1)
    dumped = first.choices[0].message.model_dump()
    assert {"refusal", "annotations", "audio", "function_call", "tool_calls"} <= set(dumped)
    again = client.chat.completions.create(
        model=NAME, messages=[*TALK, dumped, {"role": "user", "content": "weather?"}], max_tokens=4
    )
    assert again.choices[0].finish_reason
    played = {"role": "assistant", "content": "Yes", "annotations": [], "parsed": None, "reasoning_content": "so"}
    assert post(port, CHAT, ASK | {"messages": [*TALK, played, *TALK]})[0] == 200
    refused = {"role": "assistant", "content": None, "refusal": "No, 42!"}
    assert post(port, CHAT, ASK | {"messages": [*TALK, refused, *TALK]})[0] == 200
    parts = [{"type": "text", "text": "Yes"}, {"type": "refusal", "refusal": "No"}]
    assert post(port, CHAT, ASK | {"messages": [*TALK, {"role": "assistant", "content": parts}, *TALK]})[0] == 200


def test_none_is_absent(port):
    nothing = dict.fromkeys(
        ("temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice", "response_format", "logprobs",
         "top_logprobs", "logit_bias", "frequency_penalty", "presence_penalty", "stream", "stream_options", "user",
         "functions", "function_call", "modalities", "audio", "reasoning_effort", "parallel_tool_calls")
    )  # fmt: skip
    assert post(port, CHAT, ASK | nothing)[0] == 200


def test_template_variables_reach_the_template(tmp_path):
    session = make_session(tmp_path / "model")
    source = (
        session.chat.source
        + "{% if enable_thinking is defined %}{{ 'Paris ' * 9 if enable_thinking else 'No' }}{% endif %}"
    )
    template = type(session.chat)(source + "{{ reasoning_effort or '' }}", session.tokenizer, session.chat.tokens)
    object.__setattr__(session, "chat", template)
    with serving(session) as (port, _):
        sizes = [
            post(port, CHAT, ASK | changes)[1]["usage"]["prompt_tokens"]
            for changes in (
                {}, {"chat_template_kwargs": {"enable_thinking": True}},
                {"reasoning_effort": "none"}, {"reasoning_effort": "high"},
            )
        ]  # fmt: skip
        assert sizes[1] > sizes[0] + 8
        assert sizes[2] > sizes[0]
        assert sizes[3] > sizes[0]
        status, content, _ = post(port, CHAT, ASK | {"chat_template_kwargs": {"messages": []}})
        assert (status, content["error"]["param"]) == (400, "chat_template_kwargs.messages")


NAMED = [
    (CHAT, {"temperature": 3}, "temperature"), (CHAT, {"top_p": 2}, "top_p"), (CHAT, {"min_p": -1}, "min_p"),
    (CHAT, {"n": 0}, "n"), (CHAT, {"n": 99}, "n"), (CHAT, {"frequency_penalty": 9}, "frequency_penalty"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"), (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (CHAT, {"logit_bias": {"5": 1000}}, "logit_bias.5"), (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs"), (CHAT, {"stop": ["a", 3]}, "stop.1"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "tools.0.type"), (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage"),
    (CHAT, {"reasoning_effort": "enormous"}, "reasoning_effort"), (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"audio": {"voice": "a"}}, "audio"), (CHAT, {"best_of": 2}, "best_of"),
    (CHAT, {"messages": [*TALK, {"role": "assistant", "content": "x", "mood": 1}]}, "messages.1.mood"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.0.text"),
    (TEXT, {"best_of": 3}, "best_of"), (TEXT, {"prompt": ["a", 3]}, "prompt.0"), (TEXT, {"suffix": "x"}, "suffix"),
    (TEXT, {"prompt": [[1], [-3]]}, "prompt.1.0"), (TEXT, {"echo": True, "logprobs": 1}, "logprobs"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "changes", "param"), NAMED)
def test_an_error_names_the_field(port, path, changes, param):
    body = ASK if path == CHAT else {"model": NAME, "prompt": "hello"}
    status, content, _ = post(port, path, body | changes)
    assert (status, content["error"]["param"]) == (400, param), content
    assert content["error"]["type"] == "invalid_request_error"


def test_a_prompt_and_answer_that_memory_cannot_hold(session):
    from tests.serving.served import make_batch

    with serving(session, Limits(concurrent=2), draws=make_batch(session, 2, budget_bytes=20_000)) as (port, worker):
        most = worker.draws.most_positions
        assert 10 < most < 200
        status, content, _ = post(port, CHAT, ASK | {"max_tokens": 200})
        assert (status, content["error"]["param"], content["error"]["code"]) == (
            400, "max_tokens", "context_length_exceeded",
        )  # fmt: skip
        del (body := dict(ASK))["max_tokens"]
        assert post(port, CHAT, body)[1]["usage"]["total_tokens"] <= most


def test_a_logprob_of_nothing_is_json(port):
    status, content, _ = post(port, CHAT, ASK | {"logprobs": True, "logit_bias": {"5": -100}})
    assert status == 200
    assert all(math.isfinite(one["logprob"]) for one in content["choices"][0]["logprobs"]["content"])
    assert json.dumps(content, allow_nan=False)

"""Generated requests: right ones, wrong ones, and ones of which each field may be either."""

import json

from hypothesis import strategies as st

from tests.serving.served import NAME
from tests.serving.test_tools import TOOLS

TEXTS = st.text("hello Paris,\n<|im_end|>é🦊\u0301\x00{}", max_size=20)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALL = st.fixed_dictionaries(
    {"id": TEXTS, "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": TEXTS, "arguments": TEXTS})},
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "wizard"])},
    optional={
        "content": TEXTS | st.none() | st.lists(
            st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "image_url"])},
                                  optional={"text": TEXTS, "refusal": TEXTS, "image_url": JUNK}), max_size=2),
        "name": TEXTS | st.none(), "tool_call_id": TEXTS, "refusal": TEXTS | st.none(), "annotations": st.just([]),
        "tool_calls": st.none() | st.lists(CALL, max_size=2), "function_call": st.none(), "audio": st.none(),
    },
)  # fmt: skip
TALK = st.just([{"role": "user", "content": "hello"}])
FIELDS = {
    "max_tokens": st.integers(1, 6), "temperature": st.floats(0, 2), "top_p": st.floats(1e-300, 1),
    "seed": st.integers(),
    "top_k": st.integers(0, 500), "min_p": st.floats(0, 1), "n": st.integers(1, 3),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "frequency_penalty": st.floats(-2, 2), "presence_penalty": st.floats(-2, 2), "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 500).map(str), st.floats(-100, 100), max_size=3),
    "user": TEXTS, "metadata": st.just({"a": "b"}), "stream_options": st.just({"include_usage": True}),
}  # fmt: skip
OF_CHAT = FIELDS | {
    "max_completion_tokens": st.integers(1, 6), "logprobs": st.booleans(), "top_logprobs": st.integers(0, 20),
    "tools": st.just(TOOLS), "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "chat_template_kwargs": st.dictionaries(TEXTS, JUNK, max_size=2),
    "reasoning_effort": st.sampled_from(["none", "low"]), "parallel_tool_calls": st.booleans(),
}  # fmt: skip
IDS = st.lists(st.integers(0, 500), max_size=4)
OF_TEXT = FIELDS | {"logprobs": st.integers(0, 5), "echo": st.booleans(), "best_of": st.integers(1, 3)}


@st.composite
def bodies(draw):
    """A path and a body: mostly right but for a field or two."""
    chat = draw(st.booleans())
    fields = OF_CHAT if chat else OF_TEXT
    body = {"model": NAME, "max_tokens": 4}
    if chat:
        body["messages"] = draw(TALK | st.lists(MESSAGE, max_size=4))
    else:
        body["prompt"] = draw(TEXTS | IDS | st.lists(TEXTS, max_size=2) | st.lists(IDS, max_size=2))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4)):
        body[name] = draw(fields[name])
    for name in draw(st.lists(st.sampled_from([*fields, "messages", "prompt", "model"]) | TEXTS, max_size=1)):
        if draw(st.booleans()):
            body[name] = draw(JUNK)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return path, json.dumps(body).encode()

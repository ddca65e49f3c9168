"""What a model's folder brings may fail or take too much: that ends one request, not the server, and not a command."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.cli.tuned import arguments, make_model, make_talks
from tests.cover import some
from tests.serving.served import NAME, make_session, post, serving
from tilewright.cli.app import run
from tilewright.data.chat import sandbox
from tilewright.data.chat.load import CHATML
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.guarded_tokenizer import Direct, failures_told

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CASES = {
    "loop": LOOP,
    "long": "{{ 'a'.ljust(4000000000) }}",
    "raise": "{{ 1 / 0 }}",
    "number": "{{ (9 + messages | length) ** 10000000 }}",
}
PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


class Panicking(Direct):
    """Panics where a text has the word, and at the id where ids have it."""

    def encode(self, text, special=False):
        with failures_told("Tokenizer fails on a text"):
            if "panic" in text:
                raise PANIC("index out of bounds")
        return super().encode(text, special)

    def decode(self, ids, skip_special=True):
        with failures_told("Tokenizer fails on token ids"):
            if 7 in ids:
                raise PANIC("index out of bounds")
        return super().decode(ids, skip_special)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(sandbox, "_CPU_S", 0.5)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    made = make_session(tmp_path_factory.mktemp("model") / "model")
    tokenizer = replace(made.tokenizer)
    vars(tokenizer)["reader"] = vars(tokenizer)["_prompts"] = Panicking(tokenizer.backend)
    cases = "".join(f"{{% if '{word}' in messages[0].content %}}{case}{{% endif %}}" for word, case in CASES.items())
    return replace(made, tokenizer=tokenizer, chat=ChatTemplate(cases + CHATML, tokenizer))


def test_requests_that_fail_end_alone_and_others_are_answered(session):
    def ask(content):
        body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        return post(port, CHAT, body | {"temperature": 0})  # a drawn token may be the one that panics

    with serving(session) as (port, _), ThreadPoolExecutor(6) as pool:
        start = time.perf_counter()
        words = [*CASES, "hello", "hello"]
        found = dict(zip(words, pool.map(ask, words), strict=True))
        assert time.perf_counter() - start < 200
        for word in CASES:
            status, body, _ = found[word]
            assert status == 400, (word, body)
            assert body["error"]["param"] == "messages"
        assert "too much time or memory" in found["loop"][1]["error"]["message"]
        assert found["hello"][0] == 200
        for prompt, right in (("a panic", (400,)), ([7, 8], (500,)), ("hello", (200,))):
            status, body, _ = post(port, TEXT, {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0})
            assert status in right, (prompt, body)
        assert ask("hello")[0] == 200


@pytest.mark.parametrize("how", some(["chat", "finetune"], "chat"))
def test_a_command_with_a_template_that_takes_too_much_says_so(how, tmp_path, capsys):
    folder = make_model(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").write_text(LOOP + CHATML)
    command = ["chat", str(folder), "--message", "hello"]
    if how == "finetune":
        talks = make_talks(tmp_path / "talks.jsonl", 5)
        command = ["finetune", str(folder), str(talks), *arguments(tmp_path, train__steps=1)]
    assert run(command) == 2
    said = capsys.readouterr().err
    assert "Chat template takes too much time or memory" in said
    assert "try" in said
    assert "Traceback" not in said

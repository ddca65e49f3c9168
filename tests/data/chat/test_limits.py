"""Templates that take all the time or memory there is end within their limits, and take nothing else with them."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cover import some
from tests.data.chat.families import FAMILIES, make_folder
from tests.draws import examples
from tilewright.core.errors import DataError
from tilewright.data.chat import sandbox
from tilewright.data.chat.errors import ChatError, TemplateTooMuchError
from tilewright.data.chat.load import CHATML
from tilewright.data.chat.sandbox import (
    LimitedTemplate,
    TemplateError,
    TemplateLimitError,
    TextsWanted,
    compile_template,
)
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.common.tokenizer import load_tokenizer, train_tokenizer

TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
WAIT_S = 200
"""Most seconds of the clock for one: the limit of the tests is 0.5 s of the processor, on a machine with other work."""

LONG_STRINGS = [
    "'a'.ljust(4000000000)",
    "'a'.center(4000000000)",
    "'%4000000000d' % 1",
    "'{:4000000000}'.format('a')",
    "'a' * 4000000000",
    "['a'] * 1000000000",
    "('a' * 1000000) | replace('a', 'b' * 1000000)",
    "'ab'.zfill(4000000000)",
    "'\\t'.expandtabs(4000000000)",
    "10 ** 1000000",
    "10 ** 10 ** 9",
    "(9 ** 9 ** 8) % 7",
    "'a' | indent(4000000000, true)",
    "lipsum(n=100000000)",
]
LOOPS = [
    "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% macro m(n) %}{{ m(n - 1) if n else '' }}{{ m(n - 1) if n else '' }}{% endmacro %}{{ m(60) }}",
    "{% set ns = namespace(x=[1]) %}{% for a in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ range(99999) | map('string') | list | sort | join('x') | batch(1) | list | string | length }}" * 40,
]
SYNTAX = {
    "brackets": ("{{ ", "(", 100_000, "}}"),
    "blocks": ("", "{% if 1 %}", 3000, ""),
    "signs": ("{{ ", "-", 50_000, "1 }}"),
    "50 MB": ("{{ '", "a", 50 << 20, "' }}"),
}
"""Head, what is repeated, how often, tail."""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A limit that a test can wait for."""
    monkeypatch.setattr(sandbox, "_CPU_S", 0.5)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["hello you " * 9], 300)


def ends(source, tokenizer):
    """It is compiled and rendered, or refused in words; within the time, and others go on."""
    start = time.perf_counter()
    try:
        text = ChatTemplate(source, tokenizer).render(TALK)
    except ChatError:
        text = "a row is refused"
    except DataError as error:
        text = str(error)
    assert time.perf_counter() - start < WAIT_S
    assert len(text) < 1 << 28
    assert ChatTemplate(CHATML, tokenizer).render(TALK).startswith("<|im_start|>user")


@pytest.mark.parametrize("expression", LONG_STRINGS)
def test_a_template_that_asks_for_gigabytes_ends(expression, tokenizer):
    ends("{{ (" + expression + ") | string | length }}", tokenizer)


@pytest.mark.parametrize("source", some(LOOPS, LOOPS[0], LOOPS[3], LOOPS[5]))
def test_a_template_that_loops_ends(source, tokenizer):
    ends(source, tokenizer)


@pytest.mark.parametrize("name", SYNTAX)
def test_a_template_that_cannot_be_compiled_ends(name, tokenizer):
    head, part, times, tail = SYNTAX[name]
    ends(head + part * times + tail, tokenizer)


@given(
    st.recursive(
        st.sampled_from(["'a'", "messages", "9", "range(99999)", "messages[0].content", "cycler('a', 'b')"]),
        lambda inner: st.one_of(
            st.tuples(inner, inner, st.sampled_from(["+", "*", "~", "**", "%", "<"])).map(
                lambda t: f"({t[0]} {t[2]} {t[1]})"
            ),
            st.tuples(inner, st.sampled_from([".ljust(99999999)", ".center(9**9)", " | list", " | join('ab')"])).map(
                lambda t: f"({t[0]}){t[1]}"
            ),
            inner.map(lambda e: f"({e} | string) * 99999"),
            inner.map(lambda e: f"'{{:>9999999}}'.format({e})"),
        ),
        max_leaves=6,
    )
)
@examples(8)
def test_generated_templates_end(tokenizer, expression):
    ends("{% for m in messages %}{{ (" + expression + ") | string | length }}{% endfor %}", tokenizer)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_published_template_renders_the_same_inside_and_outside_of_the_process(name):
    source = FAMILIES[name].template
    given = {"messages": TALK, "tools": None, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "é\ud83e"}
    for mark in (False, True):
        expected = compile_template(source, mark).render(**given)
        assert LimitedTemplate(source).render(given, mark) == expected
    cuts = [{"messages": n, "add_generation_prompt": n < 2, "mark": False} for n in (1, 2)]
    [together] = LimitedTemplate(source).render_all([TextsWanted(given, cuts)])
    changed = [given | {"messages": TALK[:n], "add_generation_prompt": n < 2} for n in (1, 2)]
    assert together.found == [compile_template(source).render(**one) for one in changed]


def test_of_several_texts_in_one_request_each_raises_for_itself():
    template = LimitedTemplate("{{ 1 / (messages | length - 1) }}")
    cuts = [{"messages": n, "mark": False} for n in (0, 1, 2)]
    [rendered] = template.render_all([TextsWanted({"messages": TALK}, cuts)])
    first, second, third = rendered.found
    assert (first, third) == ("-1.0", "1.0")
    assert isinstance(second, TemplateError)
    assert "ZeroDivisionError" in str(second)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "marked", "glm4"])
def test_what_was_rendered_ahead_is_what_is_rendered(name, tmp_path):
    folder = make_folder(tmp_path, name)
    chats = [ChatTemplate.load(str(folder), load_tokenizer(folder)) for _ in range(2)]
    talk = [*TALK, {"role": "user", "content": "hello <|im_end|>"}, {"role": "assistant", "content": "you", "x": None}]
    wanted = chats[0].wanted(talk, [(n, prompt) for n in range(1, 5) for prompt in (False, True)])
    known = chats[0].ahead([chats[0].wanted(TALK[:1], [(1, True)]), wanted])
    for messages in (talk, TALK, talk[:3], [*talk[:3], TALK[1]], [{"role": "user", "content": "other"}]):
        for prompt in (False, True):
            with chats[0].knowing(known):
                ours, theirs = (_or_reason(chat.marked, messages, prompt, answers=True) for chat in chats)
            assert ours == theirs


def _or_reason(call, *given, **named):
    try:
        return call(*given, **named)
    except ChatError as error:
        return error.reason


def test_more_templates_than_are_kept_and_a_process_that_ends_are_told_again():
    templates = [LimitedTemplate(f"{i} {{{{ x }}}}") for i in range(2 * sandbox._KEPT)]
    assert [t.render({"x": "é"}) for t in templates] == [f"{i} é" for i in range(len(templates))]
    with pytest.raises(TemplateLimitError, match=r"0\.5 processor seconds"):
        LimitedTemplate(LOOPS[0]).render({})
    assert templates[0].render({"x": 1}) == "0 1"
    with pytest.raises(TemplateError, match="TemplateSyntaxError"):
        LimitedTemplate("{% if %}")
    sandbox.template_process(os.getpid())._child.kill()
    assert templates[1].render({"x": 1}) == "1 1"


def test_a_template_that_takes_too_much_says_so_in_four_parts(tokenizer):
    with pytest.raises(TemplateTooMuchError) as caught:
        ChatTemplate(LOOPS[0], tokenizer, where="model/chat_template.jinja").render(TALK)
    problem = caught.value.problems[0]
    assert "0.5 processor seconds" in problem.got
    assert problem.where == "model/chat_template.jinja"
    assert problem.need
    assert problem.try_

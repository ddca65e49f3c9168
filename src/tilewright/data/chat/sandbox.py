"""Chat templates are programs from model folders: they run in jinja2's sandbox, which gives them no way out.

The environment has what transformers gives a template (filters, functions, trimming), so that both render the same
text. Where asked, `{% generation %}` blocks come out between two marks, which `split_marks` takes away again.
"""

import json
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

GENERATION_BEGIN, GENERATION_END = "\ue0f0", "\ue0f1"
"""Around what `{% generation %}` encloses; characters of the private use area."""
TEXT_BEGIN, TEXT_END = "\ue0f2", "\ue0f3"
"""Around the name of a control token that is in a message and not written by the template."""
_MARKED = "__marked__"
_ANY_MARK = re.compile(f"[{GENERATION_BEGIN}{GENERATION_END}{TEXT_BEGIN}{TEXT_END}]")


class _Generation(Extension):
    """`{% generation %}`: what the assistant wrote, by the template's own account."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        text = caller()
        return f"{GENERATION_BEGIN}{text}{GENERATION_END}" if self.environment.globals[_MARKED] else text


class _Namespace(jinja2.utils.Namespace):
    """Refuses names that reach into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"name {name!r} on a namespace")
        super().__setitem__(name, value)


def compile_template(source: str, mark_generation: bool = False) -> jinja2.Template:
    """A template that renders as transformers renders it, or with marks around its `{% generation %}` blocks.

    Raises:
        jinja2.TemplateError: it is not a template.

    Example:
        >>> compile_template("{{ a | tojson }} {{ a.__class__ }}").render(a=["é"])
        '["é"] '
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    environment.globals[_MARKED] = mark_generation
    return environment.from_string(source)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def split_marks(text: str) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
    """A rendered text without marks, and the character ranges in it that the two pairs enclosed.

    Returns:
        The text, ranges of `{% generation %}` blocks, ranges of control tokens that are text.

    Example:
        >>> split_marks("ab\\ue0f0cd\\ue0f1e")
        ('abcde', [(2, 4)], [])
    """
    kept: list[str] = []
    length = start = 0
    open_at: dict[str, int] = {}
    found: dict[str, list[tuple[int, int]]] = {GENERATION_END: [], TEXT_END: []}
    for match in _ANY_MARK.finditer(text):
        mark = match[0]
        kept.append(text[start : match.start()])
        length += match.start() - start
        start = match.end()
        if mark in (GENERATION_BEGIN, TEXT_BEGIN):
            open_at[mark] = length
        else:
            begin = open_at.pop(GENERATION_BEGIN if mark == GENERATION_END else TEXT_BEGIN, None)
            if begin is not None and begin < length:
                found[mark].append((begin, length))
    kept.append(text[start:])
    return "".join(kept), found[GENERATION_END], found[TEXT_END]


def without_marks(value: Any) -> Any:
    """A message without characters that would be taken for marks."""
    if isinstance(value, str):
        return _ANY_MARK.sub("", value)
    if isinstance(value, dict):
        return {key: without_marks(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_marks(item) for item in value]
    return value

"""Chat templates are programs from model folders: they run in jinja2's sandbox, which gives them no way out, in a
process of their own under limits of time and memory (`common.limited_process`).

The environment has what transformers gives a template (filters, functions, trimming), so that both render the same
text. Where asked, `{% generation %}` blocks come out between two marks, which `split_marks` takes away again.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tilewright.data.common.limited_process import Kept, KilledError, LimitedProcess, serve

GENERATION_BEGIN, GENERATION_END = "\ue0f0", "\ue0f1"
"""Around what `{% generation %}` encloses; characters of the private use area."""
TEXT_BEGIN, TEXT_END = "\ue0f2", "\ue0f3"
"""Around the name of a control token that is in a message and not written by the template."""
_MARKED = "__marked__"
_ANY_MARK = re.compile(f"[{GENERATION_BEGIN}{GENERATION_END}{TEXT_BEGIN}{TEXT_END}]")


_CPU_S = 5.0
"""Processor seconds to compile a template, or to render a conversation: usual ones take a millisecond. A conversation
gets a second more for each of its megabytes."""
_MEMORY_BYTES = 1 << 30
"""Address space of the process, and more for long conversations: 40 times their text."""
_MAX_CHARS = 1 << 20
"""Of a template; published ones have up to 30,000."""
_KEPT = 32  # compiled templates in the process


class TemplateError(Exception):
    """A chat template that raises, or is none."""


class TemplateLimitError(Exception):
    """A chat template that takes more time or memory than its process gets."""


@dataclass(frozen=True)
class TextsWanted:
    """Texts of one conversation that the process of chat templates is to render.

    Args:
        variables: what the template gets; what JSON can hold.
        cuts: of each text, `mark` as `mark_generation` of `LimitedTemplate.render`, and where they are there
            `messages`, how many of the variable of that name, and `add_generation_prompt`, instead of that variable.
    """

    variables: Mapping[str, Any]
    cuts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RenderedTexts:
    """Texts of `wanted` that the process of chat templates rendered, or the error that each of them raises."""

    wanted: TextsWanted
    found: Sequence[str | TemplateError | TemplateLimitError]

    def text(self, variables: Mapping[str, Any], mark_generation: bool) -> str | None:
        """A text rendered in the sandbox that `LimitedTemplate.render` would give, where it is here; else None.

        Raises:
            TemplateError: the template raises.
        """
        messages, ours = variables.get("messages"), self.wanted.variables
        if not isinstance(messages, list) or messages != ours["messages"][: len(messages)]:
            return None
        prompt = variables["add_generation_prompt"]
        cut = {"messages": len(messages), "add_generation_prompt": prompt, "mark": mark_generation}
        cut_out = {"messages": None, "add_generation_prompt": None}
        if cut not in self.wanted.cuts or {**variables, **cut_out} != {**ours, **cut_out}:
            return None
        found = self.found[self.wanted.cuts.index(cut)]
        if isinstance(found, TemplateError):
            raise found
        return found if isinstance(found, str) else None  # what lacked memory among others may have it alone


class LimitedTemplate:
    """A chat template that is compiled and rendered in the sandboxed process of templates, under limits.

    Args:
        source: the jinja text.

    Raises:
        TemplateError: it is not a template.
        TemplateLimitError: it is too long, or takes too much to compile.

    Example:
        >>> LimitedTemplate("{{ a | tojson }} {{ a.__class__ }}").render({"a": ["é"]})
        '["é"] '
    """

    def __init__(self, source: str):
        if len(source) > _MAX_CHARS:
            raise TemplateLimitError(f"a template of {len(source)} characters, of {_MAX_CHARS} at most")
        self._source = source
        self._key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        self._known: Sequence[RenderedTexts] = ()
        self._call([])

    def render(self, variables: Mapping[str, Any], mark_generation: bool = False) -> str:
        """Render messages in the sandbox of chat templates to text, or with marks around `{% generation %}` blocks.

        Args:
            variables: what the template gets; what JSON can hold.
            mark_generation: see `split_marks`.

        Raises:
            TemplateError: it raises.
            TemplateLimitError: it takes too much.
        """
        for one in self._known:
            text = one.text(variables, mark_generation)
            if text is not None:
                return text
        [rendered] = self.render_all([TextsWanted(variables, [{"mark": mark_generation}])])
        [found] = rendered.found
        if isinstance(found, Exception):
            raise found
        return found

    def render_all(self, wanted: Sequence[TextsWanted]) -> list[RenderedTexts]:
        """Render all texts of several conversations in one request to the sandbox's process of chat templates.

        Args:
            wanted: of each conversation.

        Raises:
            TemplateLimitError: together they take too much.
        """
        found = self._call(wanted)["found"]
        texts = [[one.get("text", "") if "error" not in one else _raised(one) for one in several] for several in found]
        return [RenderedTexts(one, several) for one, several in zip(wanted, texts, strict=True)]

    @contextmanager
    def knowing(self, texts: Sequence[RenderedTexts]) -> Iterator[None]:
        """While this lasts, the sandbox knows texts, `render` looks its texts up in these first."""
        self._known = texts
        try:
            yield
        finally:
            self._known = ()

    def _call(self, wanted: Sequence[TextsWanted]) -> dict[str, Any]:
        size = sum(_size(one.variables) * len(one.cuts) for one in wanted)
        cpu_s, memory_bytes = _CPU_S + size / 1e6, _MEMORY_BYTES + 40 * size
        process = template_process(os.getpid())
        request = [{"variables": dict(one.variables), "cuts": list(one.cuts)} for one in wanted]
        try:
            found = process.call(cpu_s, memory_bytes, self._key, lambda: {"source": self._source}, wanted=request)
        except KilledError as error:
            limits = f"more than {cpu_s:.3g} processor seconds or {memory_bytes / 2**20:.0f} MiB"
            raise TemplateLimitError(f"{limits}; its process ended with signal {error.signal}") from None
        if "error" in found:
            raise _raised(found)
        return found


def _raised(found: Mapping[str, str]) -> TemplateError | TemplateLimitError:
    if found["error"] == "MemoryError":
        return TemplateLimitError("more memory than its process has")
    return TemplateError(f"{found['error']}: {found['said']}")


@lru_cache(maxsize=1)
def template_process(pid: int) -> LimitedProcess:
    """The sandbox's process of chat templates of the process `pid`, which must be the caller's (see
    `readers.parser_process`)."""
    assert pid == os.getpid()
    return LimitedProcess(__name__)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8


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
    """Compile a template in the sandbox that renders as transformers renders it, or with marks around its `{%
    generation %}` blocks. Only for the process of templates: nothing limits it here.

    Raises:
        jinja2.TemplateError: it is not a template.
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
    """Remove the sandbox's marks from a rendered conversation; returns the text, and the character ranges that the two
    pairs enclosed.

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
    """A message for the sandbox without characters that would be taken for marks of a chat template."""
    if isinstance(value, str):
        return _ANY_MARK.sub("", value)
    if isinstance(value, dict):
        return {key: without_marks(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_marks(item) for item in value]
    return value


def _answers() -> Any:
    """The answer of the sandbox's process to a request; it keeps the templates that it has compiled."""
    kept = Kept(lambda given: [compile_template(given["source"], mark) for mark in (False, True)], _KEPT)

    def answer(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        found = _tried(lambda: {"both": kept.of(request)})
        if "error" in found:
            yield found
        elif found["both"] is None:
            yield kept.unknown()
        else:
            yield {"found": [_texts(found["both"], **one) for one in request["wanted"]]}

    return answer


def _texts(
    both: Sequence[jinja2.Template], variables: dict[str, Any], cuts: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    return [_tried(_render, both, variables, cut) for cut in cuts]


def _render(both: Sequence[jinja2.Template], variables: dict[str, Any], cut: dict[str, Any]) -> dict[str, Any]:
    template = both[cut.pop("mark")]
    if "messages" in cut:
        cut["messages"] = variables["messages"][: cut["messages"]]
    return {"text": template.render(variables | cut)}


def _tried(make: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    try:
        return make(*given)
    except Exception as error:  # noqa: BLE001  a template is a program, and raises whatever a program can
        said = str(error).splitlines() or [""]
        return {"error": type(error).__name__, "said": said[0][:200]}


if __name__ == "__main__":
    compile_template("{{ '' }}").render()  # what the first template takes is not taken from its time
    serve(_answers())

"""Calls of tools in what a model says: six published formats, found in its template, parsed as the text comes.

- hermes (Qwen, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several of them, text before.
- mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`, at the end.
- glm (GLM-4.5): `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument.
- qwen3_coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
- deepseek (V3, R1, V3.1): between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, as JSON behind the name.
- llama3: `{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`.

Values of glm and qwen3_coder are texts where the tool's schema says so, else JSON. What looks like a call and is none
stays text: nothing that the model said is lost.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["hermes", "glm", "qwen3_coder", "deepseek", "mistral", "llama3"]
_LETTERS = string.ascii_letters + string.digits
_OPEN, _CLOSE, _MISTRAL, _ARGS = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_BLOCKS = {kind: (_OPEN, _CLOSE) for kind in ("hermes", "glm", "qwen3_coder")} | {"deepseek": (_CALLS, _CALLS_END)}
"""Marks around calls of formats that have marks on both sides."""
TOKENS: Mapping[Kind, tuple[str, ...]] = {
    "hermes": (_OPEN, _CLOSE),
    "glm": (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
    "qwen3_coder": (_OPEN, _CLOSE),
    "deepseek": (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP),
    "mistral": (_MISTRAL, _ARGS),
    "llama3": (),
}
"""Tokens that are a part of calls, and that decoding leaves out where they are special."""
ENFORCED = ("hermes", "mistral", "llama3")
"""Formats of which a call can be made certain."""
_HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can say and no text can hold."""
_PYTHON = {"True": True, "False": False, "None": None}
"""Constants as templates write them that print values of Python."""


@dataclass(frozen=True)
class FunctionCall:
    """One call.

    Args:
        name: of the function.
        arguments: JSON.
        id: by which the result is told.
    """

    name: str
    arguments: str
    id: str

    def to_json(self) -> dict[str, Any]:
        """A tool's call as OpenAI's object."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def format_of(template: str) -> Kind | None:
    """The format of tools' calls that a chat template asks for; None where it takes no tools, or another format.

    Args:
        template: its source.
    """
    if not re.search(r"\btools\b", template):
        return None
    marks: dict[str, Kind] = {_CALLS: "deepseek", _KEY: "glm", _FUNCTION: "qwen3_coder"}
    for mark, kind in marks.items():
        if mark in template:
            return kind
    if _OPEN in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    return "llama3" if '"parameters"' in template or "<|python_tag|>" in template else None


@dataclass
class Said:
    """The additions of a piece of an answer: text outside of calls, and the calls that it completes."""

    text: str = ""
    calls: list[FunctionCall] = field(default_factory=list)


class CallParser:
    """Takes an answer's text piece by piece.

    Args:
        kind: the format.
        names: of the functions that there are; an object with another name is no call.
        schemas: of their parameters, by name.

    Example:
        >>> parser = CallParser("hermes", ["f"])
        >>> parser.push('Yes. <tool_call>{"name": "f", "argum')
        Said(text='Yes. ', calls=[])
        >>> [(call.name, call.arguments) for call in parser.push('ents": {"a": 1}}</tool_call>').calls]
        [('f', '{"a": 1}')]
    """

    def __init__(self, kind: Kind, names: Sequence[str], schemas: Mapping[str, Any] | None = None):
        self._kind, self._names, self._schemas = kind, frozenset(names), schemas or {}
        self._held = ""
        """Text that is, or could become, a call."""
        self._plain = False
        """Of llama3: the answer began with something else."""
        self._blank = ""
        """White space behind a call, which is text only where text follows."""

    def push(self, text: str) -> Said:
        """Push the next piece of text to the parser of tools' calls."""
        self._held += text
        if self._kind in _BLOCKS:
            return self._blocks(*_BLOCKS[self._kind])
        if self._kind == "llama3":
            return self._llama3()
        at = self._held.find(_MISTRAL)
        return self._given(at if at >= 0 else len(self._held) - _overlap(self._held, _MISTRAL))

    def flush(self) -> Said:
        """Flush the parser of tools' calls at the end of the answer."""
        held, self._held = self._held, ""
        if self._kind in _BLOCKS:
            begin, text = _BLOCKS[self._kind][0], held.strip()
            found = self._calls(text.removeprefix(begin)) if text.startswith(begin) else []  # without its end mark
        elif self._kind == "mistral":
            found = self._mistral(held)
        else:
            found = [] if self._plain else self._objects(held)
        return Said("", found) if found else Said(held)

    def _blocks(self, begin: str, close: str) -> Said:
        said = Said()
        while True:
            at = self._held.find(begin)
            if at < 0:
                self._move(said, len(self._held) - _overlap(self._held, begin))
                return said
            self._move(said, at)
            end = self._held.find(close)
            while end >= 0 and self._kind == "hermes" and _in_string(self._held[len(begin) : end]):
                end = self._held.find(close, end + 1)  # this one is a part of an argument
            if end < 0:
                return said
            end += len(close)
            whole, self._held = self._held[:end], self._held[end:]
            calls = self._calls(whole[len(begin) : -len(close)])
            if calls:
                said.calls += calls
                self._blank = " "
            else:
                said.text += whole

    def _move(self, said: Said, end: int) -> None:
        """Advance the parser of tool calls to `end`: the text up to there is outside of calls; white space between
        calls is dropped."""
        text, self._held = self._held[:end], self._held[end:]
        if self._blank and text.strip():
            self._blank = ""
        if not self._blank:
            said.text += text

    def _llama3(self) -> Said:
        begin = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        if self._plain or (begin and not begin.startswith(("{", "["))):
            self._plain = True
            return self._given(len(self._held))
        return Said()

    def _given(self, end: int) -> Said:
        text, self._held = self._held[:end], self._held[end:]
        return Said(text)

    def _mistral(self, held: str) -> list[FunctionCall]:
        if not held.startswith(_MISTRAL):
            return []
        found: list[FunctionCall] = []
        parts: list[str] = []
        for part in held.split(_MISTRAL)[1:]:
            if parts and _in_string(_after_name(parts[-1])[1]):  # the mark is a part of an argument
                parts[-1] += _MISTRAL + part
            else:
                parts.append(part)
        for part in parts:
            name, text = _after_name(part)
            value = _json(text) if text.strip() else {}
            named = [{"name": name, "arguments": value}] if isinstance(value, dict) else []
            new = self._objects(text) if name is None else self._made(named)
            if not new:
                return []
            found += new
        return found

    def _calls(self, text: str) -> list[FunctionCall]:
        if self._kind == "hermes":
            value = _json(text)
            return self._made(value if isinstance(value, list) else [value])
        if self._kind == "deepseek":
            return self._made(_deepseek(text))
        name, given = _glm(text) if self._kind == "glm" else _coder(text)
        if given is None:
            return []
        schema = self._schemas.get(name)
        schema = schema if isinstance(schema, Mapping) else {}
        known = schema.get("properties")
        types = known if isinstance(known, Mapping) else {}
        return self._made([{"name": name, "arguments": {k: _typed(v, types.get(k), schema) for k, v in given.items()}}])

    def _objects(self, text: str) -> list[FunctionCall]:
        """Read tool calls that are written as JSON: a list of objects, or objects separated by `;`."""
        text = text.strip().removeprefix("<|python_tag|>")
        value = _json(text)
        if isinstance(value, list):
            return self._made(value)
        values, decoder = [], json.JSONDecoder()
        while text := text.strip(" \t\r\n;"):
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            values.append(value)
            text = text[end:]
        return self._made(values)

    def _made(self, values: Sequence[Any]) -> list[FunctionCall]:
        calls = []
        for value in values:
            name = value.get("name") if isinstance(value, dict) else None
            if not isinstance(name, str) or name not in self._names:
                return []
            text = _arguments(value.get("arguments", value.get("parameters", {})))
            if text is None:
                return []
            calls.append(FunctionCall(name, text, self._new_id()))
        return calls

    def _new_id(self) -> str:
        # Mistral's templates refuse any but nine letters and digits.
        size, begin = (9, "") if self._kind == "mistral" else (24, "call_")
        return begin + "".join(secrets.choice(_LETTERS) for _ in range(size))


def _glm(text: str) -> tuple[str, dict[str, str] | None]:
    """Read a tool call as GLM writes it: name and arguments; None if the text is no call."""
    name, mark, rest = text.partition(_KEY)
    found: dict[str, str] = {}
    left = mark + rest
    while left := left.strip():
        key, one, left = left.removeprefix(_KEY).partition(_KEY_END)
        value, two, after = left.lstrip().removeprefix(_VALUE).partition(_VALUE_END)
        if not one or not two or not left.lstrip().startswith(_VALUE):
            return name.strip(), None
        left = after
        if left.strip() and not left.strip().startswith(_KEY):
            return name.strip(), None
        found[key.strip()] = value
    return name.strip(), found


def _coder(text: str) -> tuple[str, dict[str, str] | None]:
    """Read a tool call as Qwen3-Coder writes it: name and arguments; a value has lines of its own."""
    name, mark, rest = text.strip().removeprefix(_FUNCTION).partition(">")
    if not mark or not text.strip().startswith(_FUNCTION) or not rest.endswith(_FUNCTION_END):
        return name, None
    found: dict[str, str] = {}
    left = rest.removesuffix(_FUNCTION_END)
    while left := left.strip():
        key, one, after = left.removeprefix(_PARAMETER).partition(">")
        value, two, after = after.partition(_PARAMETER_END)
        if not one or not two or not left.startswith(_PARAMETER):
            return name, None
        found[key], left = value.removeprefix("\n").removesuffix("\n"), after
    return name, found


def _deepseek(text: str) -> list[Any]:
    """Read tool calls as DeepSeek writes them: objects between the outer marks; [None] if the text is no call."""
    first, *parts = text.split(_CALL)
    found: list[Any] = []
    for part in parts:
        body, end, after = part.partition(_CALL_END)
        head, mark, rest = body.partition(_SEP)
        if not end or not mark or after.strip():
            return [None]
        name, arguments = head, rest
        if not rest.lstrip().startswith("{"):  # V3: the kind stands first, and the arguments in a fence
            name, _, fenced = rest.partition("\n")
            arguments = fenced.strip().removeprefix("```json").removesuffix("```")
        value = _json(arguments)
        found.append({"name": name.strip(), "arguments": value} if isinstance(value, dict) else None)
    return found if found and not first.strip() else [None]


def _after_name(part: str) -> tuple[str | None, str]:
    """Split a tool call into the name before `[ARGS]` and the JSON after it; None if all is JSON, in which the mark may
    appear too."""
    name, mark, arguments = part.partition(_ARGS)
    return (None, part) if not mark or part.lstrip().startswith(("[", "{")) else (name.strip(), arguments)


def _arguments(given: Any) -> str | None:
    """Arguments of a tool's call as the JSON of an object that UTF-8 can hold: halves of surrogate pairs stay escapes.
    None where they are no object (null is an empty one), or where JSON cannot say them, as numbers beyond all
    bounds."""
    value = _json(given) if isinstance(given, str) else {} if given is None else given
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    text = given if isinstance(given, str) else text
    return _HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _typed(text: str, schema: Any, whole: Mapping[str, Any]) -> Any:
    """Convert an argument of a tool call that was written as text: a string if its schema has one, else JSON, or a
    string again if only Python reads it as a number (NaN)."""
    if _is_text(schema, whole):
        return text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _is_text(schema: Any, whole: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> bool:
    """True if a tool's schema takes strings: by its type, its values, or one of those that it is made of or refers
    to."""
    if not isinstance(schema, Mapping):
        return False
    kind, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return True
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return True
    ways = [way for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list) for way in schema[name]]
    if isinstance(name := schema.get("$ref"), str) and name not in seen:  # it may refer to itself
        ways, seen = [*ways, _referred(name, whole)], seen | {name}
    return any(_is_text(way, whole, seen) for way in ways)


def _referred(name: str, whole: Mapping[str, Any]) -> Any:
    """The part of a tool's schema that `#/$defs/Name` is; None where it has none."""
    found: Any = whole
    for key in name.removeprefix("#/").split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _in_string(text: str) -> bool:
    """True if JSON of a tool's call breaks off inside of a string."""
    try:
        json.JSONDecoder().raw_decode(text.strip())
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that the mark of a tool's call may begin with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)

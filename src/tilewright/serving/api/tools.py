"""Calls of tools in what a model says: three published formats, found in its template, parsed as the text comes.

- hermes (Qwen, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several of them, text before.
- mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`, at the end.
- llama3: `{"name": ..., "parameters": {...}}` as the whole answer, several separated by `;`.

What looks like a call and is none stays text: nothing that the model said is lost.
"""

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["hermes", "mistral", "llama3"]
_LETTERS = string.ascii_letters + string.digits
_OPEN, _CLOSE, _MISTRAL, _ARGS = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"
_OTHER = ("<arg_key>", "<function=")
"""Marks of formats that are not JSON between the marks of hermes: GLM-4.5, Qwen3-Coder."""
MISTRAL_TOKENS = (_MISTRAL, _ARGS)
"""Special tokens that are a part of calls, and that decoding leaves out."""


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
        """OpenAI's object."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def format_of(template: str) -> Kind | None:
    """The format of calls that a chat template asks for; None where it takes no tools, or another format.

    Args:
        template: its source.
    """
    if not re.search(r"\btools\b", template) or any(mark in template for mark in _OTHER):
        return None
    if _OPEN in template:
        return "hermes"
    if _MISTRAL in template:
        return "mistral"
    return "llama3" if '"parameters"' in template or "<|python_tag|>" in template else None


@dataclass
class Said:
    """What a piece of text adds: text that is none of a call, and calls that are complete."""

    text: str = ""
    calls: list[FunctionCall] = field(default_factory=list)


class CallParser:
    """Takes an answer's text piece by piece.

    Args:
        kind: the format.
        names: of the functions that there are; an object with another name is no call.

    Example:
        >>> parser = CallParser("hermes", ["f"])
        >>> parser.push('Yes. <tool_call>{"name": "f", "argum')
        Said(text='Yes. ', calls=[])
        >>> [(call.name, call.arguments) for call in parser.push('ents": {"a": 1}}</tool_call>').calls]
        [('f', '{"a": 1}')]
    """

    def __init__(self, kind: Kind, names: Sequence[str]):
        self._kind, self._names = kind, frozenset(names)
        self._held = ""
        """Text that is, or could become, a call."""
        self._plain = False
        """Of llama3: the answer began with something else."""
        self._blank = ""
        """White space behind a call, which is text only where text follows."""

    def push(self, text: str) -> Said:
        """The next piece."""
        self._held += text
        if self._kind == "hermes":
            return self._hermes()
        if self._kind == "llama3":
            return self._llama3()
        at = self._held.find(_MISTRAL)
        return self._given(at if at >= 0 else len(self._held) - _overlap(self._held, _MISTRAL))

    def flush(self) -> Said:
        """The end of the answer."""
        held, self._held = self._held, ""
        if self._kind == "hermes":
            body = held.strip().removeprefix(_OPEN)
            found = self._calls(body) if held.strip().startswith(_OPEN) else []  # cut off before its end mark
        elif self._kind == "mistral":
            found = self._mistral(held)
        else:
            found = [] if self._plain else self._objects(held)
        return Said("", found) if found else Said(held)

    def _hermes(self) -> Said:
        said = Said()
        while True:
            at = self._held.find(_OPEN)
            if at < 0:
                self._move(said, len(self._held) - _overlap(self._held, _OPEN))
                return said
            self._move(said, at)
            end = self._held.find(_CLOSE)
            if end < 0:
                return said
            end += len(_CLOSE)
            whole, self._held = self._held[:end], self._held[end:]
            calls = self._calls(whole[len(_OPEN) : -len(_CLOSE)])
            if calls:
                said.calls += calls
                self._blank = " "
            else:
                said.text += whole

    def _move(self, said: Said, end: int) -> None:
        """Text up to `end` is none of a call; white space between calls is dropped."""
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
        for part in held.split(_MISTRAL)[1:]:
            name, args, arguments = part.partition(_ARGS)
            new = (
                self._objects(part) if not args else self._made([{"name": name.strip(), "arguments": _json(arguments)}])
            )
            if not new:
                return []
            found += new
        return found

    def _calls(self, text: str) -> list[FunctionCall]:
        value = _json(text)
        return self._made(value if isinstance(value, list) else [value])

    def _objects(self, text: str) -> list[FunctionCall]:
        """A list of calls, or calls separated by `;`."""
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
            if not isinstance(value, dict) or value.get("name") not in self._names:
                return []
            arguments = value.get("arguments", value.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(FunctionCall(value["name"], text, self._new_id()))
        return calls

    def _new_id(self) -> str:
        # Mistral's templates refuse any but nine letters and digits.
        size, begin = (9, "") if self._kind == "mistral" else (24, "call_")
        return begin + "".join(secrets.choice(_LETTERS) for _ in range(size))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that the mark may begin with."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)

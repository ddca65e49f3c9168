"""Nothing that a conversation says is lost: each text of its messages and tools is looked for in what was rendered.

A text counts as rendered where it stands in it as it is, as JSON writes it, or with other white space, and as often as
the conversation says it. Ids that tie a result to its call, roles and types are no texts. Fields that no format knows,
such as a message's time, may be left out; they are named.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.messages import REASONING

_SAID = ("content", "tool_calls", *REASONING, "name", "refusal", "audio", "images", "videos", "documents")
"""Fields of a message that are a part of what is said."""
_TIES = ("role", "weight", "tool_call_id", "id", "type", "index")
_OF_SCHEMA = ("type", "required", "$schema", "title", "format", "strict")
"""Keys of a tool's description whose values templates write in words of their own."""


@dataclass(frozen=True)
class Leaf:
    """One text of a conversation: its field, its message (number and role), and whether the template may lose it."""

    text: str
    field: str
    message: int
    role: str
    needed: bool


class RenderedText:
    """A rendering in which texts are looked for."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def _squeezed(self) -> str:
        return "".join(self.text.split())

    def has(self, bare: str, times: int) -> bool:
        """True if a said text stands in a rendered one so many times."""
        forms = {bare, json.dumps(bare, ensure_ascii=False)[1:-1], json.dumps(bare)[1:-1]}
        if sum(self.text.count(form) for form in forms) >= times:
            return True
        return self._squeezed.count("".join(bare.split())) >= times


def lost(leaves: Sequence[Leaf], text: RenderedText) -> list[Leaf]:
    """Find texts that a rendering has lost: those that it holds less often than they occur in the conversation."""
    said = Counter(leaf.text.strip() for leaf in leaves)
    short = {bare for bare, count in said.items() if not text.has(bare, count)}
    return [leaf for leaf in leaves if leaf.text.strip() in short]


def leaves_of(messages: Sequence[Mapping[str, Any]]) -> list[Leaf]:
    """The said texts of messages in the one form."""
    found = []
    called: set[str] = set()
    for i, message in enumerate(messages):
        for field, value in message.items():
            if field in _TIES or (field == "name" and value in called and message["role"] == "tool"):
                continue
            texts = _of_calls(value) if field == "tool_calls" else _texts(value)
            found += [Leaf(text, field, i, message["role"], field in _SAID) for text in texts if text.strip()]
        called |= {call["function"]["name"] for call in message.get("tool_calls", ())}
    return found


def leaves_of_tools(tools: Sequence[Mapping[str, Any]]) -> list[Leaf]:
    """The names and descriptions of tools and of their parameters, as said texts."""
    texts = (text for tool in tools for text in _texts(tool.get("function", tool), _OF_SCHEMA))
    return [Leaf(text, "tools", -1, "", True) for text in texts if text.strip()]


def left_out(leaf: Leaf) -> ChatError:
    """The error of a said text that a template does not render."""
    where = "" if leaf.message < 0 else f" of role {leaf.role!r}"
    return ChatError(f"{leaf.field}{where} that the template leaves out", got=leaf.text[:80])


def _of_calls(calls: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for call in calls:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        yield call["function"]["name"]
        yield from _keys_and_values(arguments)


def _keys_and_values(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _keys_and_values(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys_and_values(item)
    elif isinstance(value, str):
        yield value


def _texts(value: Any, without: Sequence[str] = ("type",)) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "properties" and isinstance(item, dict):
                yield from item
                yield from _texts(list(item.values()), without)
            elif key not in without or isinstance(item, dict):
                yield from _texts(item, without)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, without)

"""Rows of chat data in the shapes that are common, each to one form: messages, or a pair of answers to a prompt.

    messages           {"messages": [{"role", "content"}, ...]}
    ShareGPT           {"conversations": [{"from", "value"}, ...], "system"}
    Alpaca             {"instruction", "input", "output", "system"}
    prompt/completion  {"prompt", "completion"}   texts, or lists of messages
    preferences        {"prompt", "chosen", "rejected"}   texts, or lists of messages with or without the prompt

Which one it is, a row says by its fields. A list may be the JSON text of one, as tables of text have it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.data.chat.template import ChatError

Row = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
}
_FIRST = ("system", "developer")


def read_row(row: Mapping[str, Any], pairs: bool) -> tuple[str, Row]:
    """The shape of a row, and its messages: {"messages"}, or {"prompt", "chosen", "rejected"} where `pairs` are wanted.

    Raises:
        ChatError: of no known shape, of the other kind, or with something wrong in it; `reason` says which.

    Example:
        >>> read_row({"instruction": "Add.", "input": "1 1", "output": "2"}, pairs=False)[0]
        'Alpaca'
        >>> read_row({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, False)[1]
        {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]}
    """
    if row.get("tools"):
        raise ChatError("tools beside the messages, which templates here do not get")
    if "chosen" in row or "rejected" in row:
        if not pairs:
            raise ChatError("row of preferences", try_='data.format = "preferences"')
        return "preferences", _pair(row)
    shape, messages = _conversation(row)
    if pairs:
        raise ChatError("row without chosen and rejected", got=f"the shape {shape}", try_='data.format = "chat"')
    check_messages(messages)
    return shape, {"messages": messages}


def _conversation(row: Mapping[str, Any]) -> tuple[str, list[Row]]:
    listed = next((row[name] for name in ("messages", "conversations", "conversation") if row.get(name)), None)
    listed = _parsed(listed)
    if isinstance(listed, list):
        old = any(isinstance(item, dict) and "from" in item for item in listed)
        messages = [_message(item) for item in listed]
        return "ShareGPT" if old else "messages", _with_system(row, messages)
    if "instruction" in row and "output" in row:
        asked = [row["instruction"], row.get("input")]
        if not isinstance(row["instruction"], str) or not isinstance(row.get("input") or "", str):
            raise ChatError("content that is not text")
        question = "\n\n".join(text for text in asked if isinstance(text, str) and text.strip())
        return "Alpaca", _with_system(row, [_said("user", question), _said("assistant", row["output"])])
    for answer in ("completion", "response", "output"):
        if "prompt" in row and answer in row:
            messages = [*_messages(row["prompt"], "user"), *_messages(row[answer], "assistant")]
            return "prompt/completion", _with_system(row, messages)
    raise ChatError("no known shape", got="fields " + ", ".join(str(name)[:40] for name in list(row)[:8]))


def _pair(row: Mapping[str, Any]) -> Row:
    chosen, rejected = (_messages(row.get(name), "assistant") for name in ("chosen", "rejected"))
    if row.get("prompt"):
        prompt = _with_system(row, _messages(row["prompt"], "user"))
        chosen, rejected = (m[len(prompt) :] if m[: len(prompt)] == prompt else m for m in (chosen, rejected))
    else:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        shared = min(shared, len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if chosen == rejected:
        raise ChatError("chosen and rejected are equal")
    if not prompt:
        raise ChatError("preferences without a prompt")
    for answer in (chosen, rejected):
        check_messages([*prompt, *answer])
        if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            raise ChatError("roles out of order")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ChatError where messages are empty, or not in an order in which people and models talk.

    System messages come first, then the user; user and assistant alternate, and tools answer the assistant.
    """
    if not messages:
        raise ChatError("no messages")
    before = ""
    for message in messages:
        role, content = message["role"], message.get("content")
        if not (content.strip() if isinstance(content, str) else message.get("tool_calls")):
            raise ChatError("empty content", got=f"of role {role}")
        follows = {
            "system": ("", *_FIRST),
            "developer": ("", *_FIRST),
            "user": ("", *_FIRST, "assistant"),
            "assistant": ("user", "tool"),
            "tool": ("assistant", "tool"),
        }[role]
        if before not in follows:
            raise ChatError("roles out of order", got=f"{role} after {before or 'nothing'}")
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        raise ChatError("no answer of the assistant")


def _message(item: Any) -> Row:
    if not isinstance(item, dict):
        raise ChatError("message that is not an object", got=type(item).__name__)
    role = item.get("role", item.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise ChatError("unknown role", got=repr(role)[:40])
    rest = {key: value for key, value in item.items() if key not in ("role", "from", "content", "value")}
    return {**_said(_ROLES[role], item.get("content", item.get("value"))), **rest}


def _said(role: str, content: Any) -> Row:
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ChatError("content that is not text", got=type(content).__name__)
    return {"role": role, "content": content}


def _messages(value: Any, role: str) -> list[Row]:
    """A list of messages, or one of `role` whose text this is."""
    value = _parsed(value)
    if isinstance(value, list):
        return [_message(item) for item in value]
    return [_message(value)] if isinstance(value, dict) else [_said(role, value)]


def _with_system(row: Mapping[str, Any], messages: list[Row]) -> list[Row]:
    """The messages behind the system message that a row has as a field; empty ones are none."""
    given = row.get("system")
    if isinstance(given, str) and given.strip():
        messages = [_said("system", given), *messages]
    return [m for m in messages if m["role"] not in _FIRST or not isinstance(m["content"], str) or m["content"].strip()]


def _parsed(value: Any) -> Any:
    """A list or object that is written as JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", "[]"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value

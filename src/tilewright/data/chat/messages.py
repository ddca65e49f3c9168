"""Messages of the formats that are common, each to one form, and the order in which they may follow each other.

The one form is OpenAI's: `role`, `content` (text), `reasoning_content`, `tool_calls`, `tool_call_id`, and whatever else
a message has, for templates that read it. An answer that is not to be trained has `weight` 0, which OpenAI writes so,
and axolotl as `train` or `training`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.tools import read_call

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
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")  # roles of messages whose content is the JSON text of calls
FIRST = ("system", "developer")
REASONING = ("reasoning_content", "reasoning", "thinking")
_WEIGHTS = ("weight", "train", "training")
_DETAILS = ("train_detail", "training_detail")
_TEXT_PARTS = ("text", "input_text", "output_text")


def read_messages(items: Sequence[Any]) -> list[Row]:
    """Read a conversation's messages to the one form; results of tools in the order of the calls that they answer.

    Raises:
        ChatError: a message that cannot be used; `reason` names the field.

    Example:
        >>> read_messages([{"from": "human", "value": "hi"}, {"role": "assistant", "content": "yes", "weight": 0}])
        [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes', 'weight': 0}]
    """
    found: list[Row] = []
    calling = False
    for item in items:
        message = _message(item)
        calls = _role_of(item) in _CALLS
        if calls and calling:
            found[-1]["tool_calls"] += message["tool_calls"]
        else:
            found.append(message)
        calling = calls
    return _in_order_of_calls(found)


def say(role: str, content: Any) -> Row:
    """A message with a content that is a text, or parts of one.

    Raises:
        ChatError: it is something else.
    """
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise ChatError("content that is not text", got=type(content).__name__)
    return {"role": role, "content": content}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ChatError where chat messages are empty, or not in an order in which people and models talk.

    System messages come first, then the user; user and assistant alternate, and tools answer the assistant.
    """
    if not messages:
        raise ChatError("no messages")
    before = ""
    for message in messages:
        role, content = message["role"], message.get("content")
        if not ((content or "").strip() or message.get("tool_calls") or role == "tool"):
            raise ChatError("empty content", got=f"of role {role}")
        follows = {
            "system": ("", *FIRST),
            "developer": ("", *FIRST),
            "user": ("", *FIRST, "assistant"),
            "assistant": ("user", "tool"),
            "tool": ("assistant", "tool"),
        }[role]
        if before not in follows:
            raise ChatError("roles out of order", got=f"{role} after {before or 'nothing'}")
        before = role
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise ChatError("no answer of the assistant")
    if not any(is_trained(message) for message in answers):
        raise ChatError("weight of every answer is 0")


def is_trained(message: Mapping[str, Any]) -> bool:
    """True if a message in the one form is an answer that is trained."""
    return message.get("role") == "assistant" and message.get("weight") != 0


def parsed(value: Any) -> Any:
    """Parse a part of a message: the list or object that it has as JSON text; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _role_of(item: Any) -> Any:
    return item.get("role", item.get("from")) if isinstance(item, dict) else None


def _message(item: Any) -> Row:
    if not isinstance(item, dict):
        raise ChatError("message that is not an object", got=type(item).__name__)
    role, content, value = _role_of(item), item.get("content"), item.get("value")
    if content and value and content != value:
        raise ChatError("content and value in one message")
    content = value if content is None else content
    if not isinstance(role, str) or role not in (*_ROLES, *_CALLS):
        raise ChatError("unknown role", got=repr(role)[:40])
    used = ("role", "from", "content", "value", "tool_calls", "function_call", *_WEIGHTS, *_DETAILS)
    rest = {key: value for key, value in item.items() if key not in used and value not in (None, [], {}, "")}
    reasons = [name for name in REASONING if name in rest]
    for name in reasons[1:]:
        if rest[name] == rest[reasons[0]]:  # one thought under several names
            del rest[name]
    calls = item.get("tool_calls")
    if role in _CALLS:
        calls, content = parsed(content), ""
        calls = calls if isinstance(calls, list) else [calls]
        role = "assistant"
    elif item.get("function_call"):  # of OpenAI, before there were tools
        calls = [item["function_call"]]
    message = {**say(_ROLES[role], content), **rest}
    if message["role"] == "tool" and message["content"] is None:
        message["content"] = ""
    if calls:
        if not isinstance(calls, list):
            raise ChatError("tool_calls that are no list of calls", got=type(calls).__name__)
        message["tool_calls"] = [read_call(call) for call in calls]
        message["content"] = message["content"] or ""  # some templates add to it, whatever it is
    if _weight(item, message["role"]) == 0:
        message["weight"] = 0
    return message


def _weight(item: Mapping[str, Any], role: str) -> int:
    """The weight of a message, 1 or 0: true if it is trained, where it is an answer. Of others nothing is trained,
    whatever they say."""
    if any(item.get(name) for name in _DETAILS):
        raise ChatError("train_detail, of parts of an answer, is not read")
    said = {name: item[name] for name in _WEIGHTS if item.get(name) is not None}
    wrong = next((name for name, value in said.items() if value not in (0, 1)), None)
    if wrong:
        raise ChatError(f"{wrong} that is neither 0 nor 1", got=repr(said[wrong])[:40])
    return int(role != "assistant" or all(said.values()))


def _part(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise ChatError("content that is not text", got=str(part.get("type")) if isinstance(part, dict) else "")
    if part.get("type", "text") not in _TEXT_PARTS:
        raise ChatError("content that is not text", got=repr(part["type"])[:40])
    other = next((key for key, value in part.items() if key not in ("type", "text") and value), None)
    if other is not None or 0 in (part.get(name) for name in _WEIGHTS):
        raise ChatError("part of content with more than a text", got=f"fields {', '.join(map(str, part))}"[:80])
    return part["text"]


def _in_order_of_calls(messages: list[Row]) -> list[Row]:
    """Messages of results behind the calls that they answer by their ids, which most templates do not write.

    Raises:
        ChatError: a result of no call.
    """
    found: list[Row] = []
    at = 0
    while at < len(messages):
        found.append(messages[at])
        at += 1
        ids = [call.get("id") for call in found[-1].get("tool_calls", ())]
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        said = [result.get("tool_call_id") for result in results]
        if ids and None not in ids and said and None not in said:
            unknown = next((one for one in said if one not in ids), None)
            if unknown is not None:
                raise ChatError("tool_call_id of no call", got=repr(unknown)[:40])
            results.sort(key=lambda result: ids.index(result["tool_call_id"]))
        found += results
    return found

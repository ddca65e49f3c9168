"""Rows of chat data in the shapes that are common, each to one form: messages, or a pair of answers to a prompt.

    messages           {"messages": [{"role", "content"}, ...]}
    ShareGPT           {"conversations": [{"from", "value"}, ...], "system"}
    Alpaca             {"instruction", "input", "output", "system", "history"}
    prompt/completion  {"prompt", "completion"}   texts, or lists of messages
    preferences        {"prompt", "chosen", "rejected"}   texts, or lists of messages with or without the prompt
                       {"input": {"messages"}, "preferred_output", "non_preferred_output"}

Which one it is, a row says by its fields. Any of them may have `tools` (or OpenAI's older `functions`) and
`chat_template_kwargs`. A list or an object may be its JSON text, as tables of text have it.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.messages import FIRST, REASONING, Row, check_messages, parsed, read_messages, say
from tilewright.data.chat.said_texts import leaves_of
from tilewright.data.chat.tools import read_tools
from tilewright.data.common.records import HALF_PAIR
from tilewright.data.sources.path_purpose import ROW_OF_CHAT, ROW_OF_PREFERENCES

PREFERENCES: Final = "preferences"
"""The shape of pairs."""
TABLES = (".parquet", ".arrow")
"""Files in which all objects of a column have the same fields."""
_LISTS = ("messages", "conversations", "conversation")
_ANSWERS = ("completion", "response", "output")
_SYSTEM = ("system", "system_prompt")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio", "documents")
_MEANT = (*_LISTS, *_ANSWERS, *REASONING, *_SYSTEM, *_MEDIA, "prompt", "instruction", "input", "history", "weight")
"""Fields that are a part of a conversation in one of the shapes. In another they are not silently dropped."""
_LABELS = ("label", "kto_tag")
_WHOLE = ("1", "1.0", "True", "true")


@dataclass(frozen=True)
class ReadRow:
    """The recognised shape of a row of chat data.

    Args:
        shape: its shape.
        found: what it says, see `read_row`.
        not_read: names of its fields that are no part of that.
    """

    shape: str
    found: Row
    not_read: list[str]


def read_row(row: Mapping[str, Any], pairs: bool) -> tuple[str, Row]:
    """Shape and content of a row of chat: {"messages"}, or {"prompt", "chosen", "rejected"} where `pairs` are wanted.

    Both may have "tools" and "variables", the fields of `tools.TemplateArguments`.

    Raises:
        ChatError: of no known shape, of the other kind, or with something wrong in it; `reason` says which.

    Example:
        >>> read_row({"instruction": "Add.", "input": "1 1", "output": "2"}, pairs=False)[0]
        'Alpaca'
        >>> read_row({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, False)[1]
        {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]}
    """
    read = read_whole(row, pairs)
    return read.shape, read.found


def read_whole(row: Mapping[str, Any], pairs: bool) -> ReadRow:
    """Read a row of chat data as `read_row` does, and name the fields that are not read.

    Raises:
        ChatError: as there.
    """
    row = _pair_of_openai(row)
    found: dict[str, Any]
    if is_pair(row):
        if not pairs:
            raise ChatError(ROW_OF_PREFERENCES, try_='data.format = "preferences"')
        shape, found = PREFERENCES, _pair(row)
    else:
        shape, messages = _conversation(row)
        if pairs:
            raise ChatError(ROW_OF_CHAT, got=f"the shape {shape}", try_='data.format = "chat"')
        check_messages(messages)
        found = {"messages": messages}
    tools = read_tools(row.get("tools") or row.get("functions"))
    if tools:
        found["tools"] = tools
    variables = parsed(row.get("chat_template_kwargs"))
    if variables:
        if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
            raise ChatError("chat_template_kwargs that are not an object", got=type(variables).__name__)
        found["variables"] = variables
    left = _not_read(row, found)
    meant = next((n for n in left if n in _MEANT and not (n == "weight" and str(row[n]) in _WHOLE)), None)
    if meant:
        raise ChatError(f"field {meant!r} that rows of the shape {shape} do not have")
    return ReadRow(shape, found, left)


def is_pair(row: Mapping[str, Any]) -> bool:
    """True if a row of chat data is one of preferences."""
    return any(name in row for name in ("chosen", "rejected", "preferred_output", "non_preferred_output"))


class RowReader:
    """Reads rows of chat data out of JSON, and counts the shapes of each file.

    Args:
        pairs: rows of preferences are wanted.

    Example:
        >>> reader = RowReader(pairs=False)
        >>> reader.read("a.jsonl", '{"prompt": "hi", "completion": "yes", "id": 7}')["messages"][1]["content"]
        'yes'
        >>> reader.shapes, reader.not_read
        ({'a.jsonl': Counter({'prompt/completion': 1})}, Counter({'id': 1}))
    """

    def __init__(self, *, pairs: bool):
        self.shapes: dict[str, Counter[str]] = {}
        self.not_read: Counter[str] = Counter()
        """Fields of rows that are no part of a conversation, by how many rows have them."""
        self._pairs = pairs

    def read(self, file: str, text: str, *, of_table: bool = False) -> Row:
        """Read a chat row's conversation or preference pair, see `read_row`.

        Args:
            file: that the row is in.
            text: the row.
            of_table: all objects of a column have the fields of all of them, those that were not there as null.

        Raises:
            ChatError: it is no row, or one that cannot be used.
        """
        try:
            text.encode()
            row = json.loads(text)
            if not isinstance(row, dict):
                raise ChatError("row that is not an object", got=type(row).__name__)
            read = read_whole(without_none(row) if of_table else row, self._pairs)
            if "\\u" in text:  # JSON in a text of the row may have escaped halves
                json.dumps(read.found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ChatError(HALF_PAIR, got=error.reason) from error
        except (ValueError, RecursionError) as error:
            raise ChatError("row that cannot be read", got=str(error)) from error
        self.shapes.setdefault(file, Counter())[read.shape] += 1
        self.not_read.update(read.not_read)
        return read.found


def said(row: Row) -> str:
    """All text that is said in a row of chat data, but for messages of the system.

    Example:
        >>> asked = [say("system", "Be kind."), say("user", "hi")]
        >>> said({"prompt": asked, "chosen": [], "rejected": [say("assistant", "no")]})
        'hi\\nno'
    """
    messages = row["messages"] if "messages" in row else [*row["prompt"], *row["chosen"], *row["rejected"]]
    return "\n".join(leaf.text for leaf in leaves_of(messages) if leaf.needed and leaf.role not in FIRST)


def without_none(value: Any) -> Any:
    """A row of chat data without the fields that are null, at any depth.

    Example:
        >>> without_none({"a": None, "b": [{"c": None, "d": 1}, None]})
        {'b': [{'d': 1}, None]}
    """
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _pair_of_openai(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat row's pair as OpenAI's fine-tuning takes it, with the names of others; any other row as it is."""
    asked = row.get("input")
    if "preferred_output" not in row or not isinstance(asked, dict):
        return row
    names = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
    rest = {names.get(name, name): value for name, value in row.items() if name != "input"}
    return {"prompt": asked.get("messages"), **{k: v for k, v in asked.items() if k != "messages"}, **rest}


def _not_read(row: Mapping[str, Any], found: Row) -> list[str]:
    """Names of the fields of a chat row whose texts are not in what is made of it, such as ids and sources."""
    used = "\n".join(text.strip() for text in _texts(found))
    left = []
    for name, value in row.items():
        if value is None or name in ("tools", "functions", "chat_template_kwargs"):
            continue
        if not isinstance(value, str | list | dict) or _texts_missing(parsed(value), used):
            left.append(str(name)[:80])
    return left


def _texts_missing(value: Any, used: str) -> bool:
    return any(text.strip() not in used for text in _texts(value, roles=False))


def _texts(value: Any, roles: bool = True) -> Iterator[str]:
    if isinstance(value, str):
        inner = parsed(value)
        if inner is value:
            yield value
        else:
            yield from _texts(inner, roles)
    elif isinstance(value, dict):
        for key, item in value.items():
            if roles or key not in ("role", "from", "type"):
                yield from _texts(item, roles)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, roles)


def _conversation(row: Mapping[str, Any]) -> tuple[str, list[Row]]:
    label = next((name for name in _LABELS if isinstance(row.get(name), bool)), None)
    if label:
        raise ChatError(f"field {label!r}: answers that are good or bad, which are not learned one by one")
    listed = parsed(next((row[name] for name in _LISTS if row.get(name)), None))
    if isinstance(listed, list):
        old = any(isinstance(item, dict) and "from" in item for item in listed)
        return "ShareGPT" if old else "messages", _with_system(row, read_messages(listed))
    if "instruction" in row and "output" in row:
        messages = [*_history(row), say("user", _question(row)), _answer(row, say("assistant", row["output"]))]
        return "Alpaca", _with_system(row, messages)
    for answer in _ANSWERS:
        if "prompt" in row and answer in row:
            last = _messages(row[answer], "assistant")
            last = [_answer(row, last[0]), *last[1:]] if last else last
            return "prompt/completion", _with_system(row, read_messages([*_messages(row["prompt"], "user"), *last]))
    raise ChatError("no known shape", got="fields " + ", ".join(str(name)[:40] for name in list(row)[:8]))


def _question(row: Mapping[str, Any]) -> str:
    asked = [row["instruction"], row.get("input")]
    if not isinstance(row["instruction"], str) or not isinstance(row.get("input") or "", str):
        raise ChatError("content that is not text")
    return "\n\n".join(text for text in asked if isinstance(text, str) and text.strip())


def _history(row: Mapping[str, Any]) -> list[Row]:
    """Read Alpaca's earlier turns from a row: pairs of a question and its answer, which is trained too (as
    LLaMA-Factory does)."""
    turns = parsed(row.get("history")) or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise ChatError("history that is no list of questions and answers")
    return [say(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]


def _answer(row: Mapping[str, Any], message: Row) -> Row:
    """The answer in a chat row with the reasoning that it has as a field."""
    name = next((name for name in REASONING if isinstance(row.get(name), str) and row[name].strip()), None)
    return message if name is None else {"reasoning_content": row[name], **message}


def _pair(row: Mapping[str, Any]) -> Row:
    chosen, rejected = (_messages(row.get(name), "assistant") for name in ("chosen", "rejected"))
    if given := _prompt(row):
        prompt = _with_system(row, given)
        chosen, rejected = (m[len(prompt) :] if m[: len(prompt)] == prompt else m for m in (chosen, rejected))
    else:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        shared = min(shared, len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = _with_system(row, chosen[:shared]), chosen[shared:], rejected[shared:]
    if chosen == rejected:
        raise ChatError("chosen and rejected are equal")
    if not prompt:
        raise ChatError("preferences without a prompt")
    if not chosen or not rejected:
        raise ChatError("preferences without an answer behind the prompt")
    for answer in (chosen, rejected):
        check_messages([*prompt, *answer])
        if answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            raise ChatError("roles out of order")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _prompt(row: Mapping[str, Any]) -> list[Row]:
    """The prompt in a chat row that both answers of a pair follow, in the shapes that have it as a field of its own."""
    if row.get("prompt"):
        return _messages(row["prompt"], "user")
    listed = parsed(next((row[name] for name in _LISTS if row.get(name)), None))
    if isinstance(listed, list) and listed and (messages := read_messages(listed))[-1]["role"] != "assistant":
        return messages
    return [*_history(row), say("user", _question(row))] if row.get("instruction") else []


def _messages(value: Any, role: str) -> list[Row]:
    """Read the messages of a chat row: a list, or one message of `role` whose text this is."""
    listed = parsed(value)
    if isinstance(listed, list) and not isinstance(value, str):
        return read_messages(listed)
    if isinstance(listed, list) and listed and all(map(_is_message, listed)):  # "[]" is a text, as of code
        return read_messages(listed)
    if isinstance(value, dict) or (isinstance(listed, dict) and _is_message(listed)):
        return read_messages([listed])
    return [say(role, value)]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or "from" in item)


def _with_system(row: Mapping[str, Any], messages: list[Row]) -> list[Row]:
    """The messages of a chat row behind the system message that it has as a field; empty ones are none."""
    given = next((row[name] for name in _SYSTEM if row.get(name)), None)
    if isinstance(given, str) and given.strip() and [say("system", given)] != messages[:1]:
        messages = [say("system", given), *messages]
    return [m for m in messages if m["role"] not in FIRST or not isinstance(m["content"], str) or m["content"].strip()]

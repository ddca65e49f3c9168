"""Form that a conversation must have before a template renders it."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.core.errors import DataError

_LIKE = 'messages like {"role": "user", "content": "Hello"}'


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check messages: raise where a conversation is none.

    Raises:
        DataError: no messages, one without a role or a content, or text that is no Unicode.
    """
    if not messages:
        raise DataError(
            "Conversation without messages",
            got="none",
            need=_LIKE,
            try_="at least one message of the user",
            where="messages",
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not _is_message(message):
            raise DataError(
                "Message without role or content",
                got=f"message {number}: {str(message)[:200]}",
                need=_LIKE,
                try_="a role and a content in each message",
                where="messages",
            )
        _check_inside(message, f"message {number}")


def check_text(text: str, where: str = "text") -> None:
    """Check text of messages: raise where it is no Unicode text: JSON, and bytes from outside, can hold half a
    character.

    Args:
        text: any.
        where: for the message.

    Raises:
        DataError: half of a surrogate pair in it; Python reads bytes that are not UTF-8 as such halves too.

    Example:
        >>> check_text("naïve 🦊")
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        byte = f"byte 0x{half - 0xDC00:02x}" if 0xDC80 <= half <= 0xDCFF else f"half of a surrogate pair, U+{half:04X}"
        raise DataError(
            "Text is not valid Unicode",
            got=f"{byte} at character {error.start + 1}",
            need="UTF-8, and in JSON both halves of a surrogate pair",
            try_="iconv -f LATIN1 -t UTF-8   (or from the encoding that the text is in)",
            where=where,
        ) from None


def _is_message(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(message.get("role"), str) and (
        isinstance(content, str | list) or (content is None and len(message) > 2)  # tool calls stand for a content
    )


def _check_inside(value: Any, where: str) -> None:
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            _check_inside(item, where)

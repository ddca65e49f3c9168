"""Added tokens of a tokenizer whose texts overlap: llama.cpp finds them in another order than the tokenizer.

A tokenizer reads from left to right and takes the longest token at each place, those that are not normalised first; a
special token that is read as text stays one piece. llama.cpp looks for the longest token in the whole text, then for
the next one in what is left, and leaves special tokens out where they are text. Both find the same as long as no text
has two tokens that share a part of each.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def why_other_order(added: Sequence[Mapping[str, Any]]) -> str | None:
    """Say why llama.cpp finds other added tokens in a text than the tokenizer; None where it finds the same in any.

    Args:
        added: `added_tokens` of a tokenizer.json.

    Example:
        >>> why_other_order([{"content": "abc"}, {"content": "bcd"}])
        "llama.cpp takes the longest token of a text first, and 'abc' overlaps 'bcd': text would get other token ids"
        >>> why_other_order([{"content": "<a>"}, {"content": "<b>"}])
    """
    tokens = {token["content"]: token for token in added}
    beginnings: dict[str, list[str]] = {}
    for text in tokens:
        for end in range(1, len(text)):
            beginnings.setdefault(text[:end], []).append(text)
    for text, token in tokens.items():
        for start in range(1, len(text)):
            for other in beginnings.get(text[start:], ()):
                if text + other != other + text:  # else both repeat one word, as runs of blanks: any order is the same
                    return _reason(text, "overlaps", other)
        for inner in _inside(text, tokens):
            if _hidden(tokens[inner], token):
                return _reason(inner, "is a part of", text)
    return None


def _inside(text: str, tokens: Mapping[str, Any]) -> list[str]:
    """Find the other added tokens within the text of one."""
    size = len(text)
    spans = [(start, end) for start in range(size) for end in range(start + 1, size + 1) if end - start < size]
    return [text[start:end] for start, end in spans if text[start:end] in tokens]


def _hidden(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    """True where a tokenizer and llama.cpp differ about a token within another: the tokenizer looks for the inner one
    earlier, or not at all within a special token that is text."""
    first, second = not inner.get("normalized"), not outer.get("normalized")
    as_text = bool(outer.get("special")) and not inner.get("special")
    return first > second or (as_text and first == second)


def _reason(one: str, relation: str, other: str) -> str:
    return (
        f"llama.cpp takes the longest token of a text first, and {one!r} {relation} {other!r}: "
        "text would get other token ids"
    )

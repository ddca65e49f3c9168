"""From tokens to text as they come: whole characters, no space lost, and nothing of a stop string.

The pieces of an answer, joined, are what decoding all of its tokens at once gives, up to the first stop string.
"""

from collections.abc import Sequence
from typing import Protocol

from tilewright.data.common.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_CONTEXT = 16
"""Tokens before a text that are decoded with it, or more where they begin within a character."""


class DecodesIds(Protocol):
    """The part of a tokenizer needed here."""

    def decode(self, ids: Sequence[int]) -> str: ...


class _Keeping:
    """Decodes with some special tokens as text."""

    def __init__(self, tokenizer: Tokenizer, names: dict[int, str]):
        self._tokenizer, self._names = tokenizer, names

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens to text with special ones kept."""
        parts, start = [], 0
        for end in (*(i for i, token in enumerate(ids) if token in self._names), len(ids)):
            parts.append(self._tokenizer.decode(ids[start:end]))
            parts += [self._names[ids[end]]] if end < len(ids) else []
            start = end + 1
        return "".join(parts)


def keeping(tokenizer: Tokenizer, names: Sequence[str]) -> DecodesIds:
    """Make a tokenizer that decodes these special tokens as text, if it has them; else the tokenizer itself."""
    found = {i: name for name in names if (i := tokenizer.backend.token_to_id(name)) in tokenizer.special_ids}
    return _Keeping(tokenizer, found) if found else tokenizer


class TextStream:
    """Text of tokens that come one by one.

    A token may hold a part of a character, and many tokenizers drop the space before the first word of what they
    decode. So tokens are decoded together with those before them, and text whose last character is not whole waits.
    Bytes that are no UTF-8 come out as replacement characters; of tokenizers with byte tokens (SentencePiece) decoding
    all at once may then replace good characters beside them too.

    Args:
        tokenizer: gives no text for special tokens.
        before: ids of a text that this one continues, and that are no part of it.

    Example:
        >>> from tilewright.data.common.tokenizer import train_tokenizer
        >>> tok = train_tokenizer(["low lower " * 9], 270)
        >>> text = TextStream(tok)
        >>> [text.push(i) for i in tok.encode("é!")], text.flush()
        (['', 'é', '!'], '')
    """

    def __init__(self, tokenizer: DecodesIds, before: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._ids = _context(tokenizer, before)
        self._done = len(self._ids)
        """Of `_ids`: those whose text was given. They are the context of the next ones."""

    def push(self, token: int) -> str:
        """Add a token to a stream of text and return the text that it completes; "" if it ends within a character."""
        self._ids.append(token)
        return self._new(whole=True)

    def flush(self) -> str:
        """Return the text that is left at the end of a stream of tokens; broken characters become their replacement."""
        return self._new(whole=False)

    def _new(self, whole: bool) -> str:
        before = self._tokenizer.decode(self._ids[: self._done])
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(before) or (whole and text.endswith(_BROKEN)):
            return ""
        del self._ids[: self._done]
        self._done = len(self._ids)
        return text[len(before) :]


def _context(tokenizer: DecodesIds, before: Sequence[int]) -> list[int]:
    size = _CONTEXT
    while size < len(before) and tokenizer.decode(before[-size:]).startswith(_BROKEN):
        size *= 2
    return list(before[-size:])


class StopFilter:
    """Holds back what could become a stop string, and ends at the first one.

    Of several the one that is complete first counts, of those the longest. So it does not matter how the text is split.

    Args:
        stops: the strings; none of them is empty.

    Example:
        >>> stop = StopFilter(["END"])
        >>> [stop.push(piece) for piece in ("one E", "N", "D two")], stop.stopped
        (['one ', '', ''], True)
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Pass text through the filter of stop strings: returns what cannot be part of one; nothing after one."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that the filter of stop strings held back, and that became no stop string."""
        held, self._held = self._held, ""
        return held


class ThoughtGate:
    """Tells a thought at the beginning of a text, with its marks, from what is behind it, as the text comes.

    Args:
        marks: around a thought.
        inside: the text begins within one.

    Example:
        >>> gate = ThoughtGate(("<think>", "</think>"), inside=False)
        >>> [gate.push(piece) for piece in ("<thi", "nk>a</th", "ink>b", "c")]
        [('', ''), ('<think>a', ''), ('</think>', 'b'), ('', 'c')]
    """

    def __init__(self, marks: tuple[str, str], inside: bool):
        self._open, self._close = marks
        self._held = ""
        self._inside: bool | None = inside or None
        """None: it is not known yet whether the text begins with a thought."""

    def push(self, piece: str) -> tuple[str, str]:
        """Pass text through the gate of thoughts: returns the thought so far and the answer behind it; text that may be
        a mark is held back."""
        text, self._held = self._held + piece, ""
        if self._inside is None:
            begin = text.lstrip(" \t\r\n")
            if begin.startswith(self._open) or not self._open.startswith(begin):
                self._inside = begin.startswith(self._open)
            else:
                self._held = text
                return "", ""
        if not self._inside:
            return "", text
        end = text.find(self._close)
        if end >= 0:
            self._inside, end = False, end + len(self._close)
            return text[:end], text[end:]
        keep = _overlap(text, self._close)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def flush(self) -> tuple[str, str]:
        """Return the text that the gate of thoughts held back, at the end of the answer."""
        held, self._held = self._held, ""
        return (held, "") if self._inside else ("", held)


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of `text` with which the stop string may begin."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

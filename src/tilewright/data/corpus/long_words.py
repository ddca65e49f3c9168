"""Texts for the training of a tokenizer without words of thousands of characters.

A merge of byte pairs goes through every word that holds the pair, from its first byte to its last. Where a text has no
spaces (Chinese, DNA, base64, a line of dashes) the word is the text, and each of thousands of merges went through all
of it. No token is longer than a few dozen bytes, so pieces of a word teach the same merges. Only the training sees the
pieces: texts are encoded whole.
"""

import re
from collections.abc import Iterable, Iterator

LONGEST_WORD = 256
"""Characters of the longest run of letters, of punctuation or of white space in what a tokenizer is trained on."""

_LONG = re.compile(
    r"[^\W\d_]{%d,}|(?:[^\w\s]|_){%d,}|\s{%d,}|\d{%d,}" % ((LONGEST_WORD + 1,) * 4)  # noqa: UP031  braces mean repeats
)


def short_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, cut where a run of letters, digits, punctuation or white space is longer than `LONGEST_WORD`.

    Example:
        >>> [len(text) for text in short_words(["two words", "a" * 600])]
        [9, 256, 256, 88]
    """
    for text in texts:
        start = 0
        for match in _LONG.finditer(text):
            for stop in range(match.start() + LONGEST_WORD, match.end(), LONGEST_WORD):
                yield text[start:stop]
                start = stop
        yield text[start:]

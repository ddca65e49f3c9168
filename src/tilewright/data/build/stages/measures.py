"""Numbers of a text that rules compare with thresholds; each names the paper that its rule is from.

Gopher: Rae et al. 2021 (arXiv 2112.11446, appendix A1.1). C4: Raffel et al. 2020 (arXiv 1910.10683, section 2.2).
FineWeb: Penedo et al. 2024 (arXiv 2406.17557, section 3.6). Words are what stands between white space.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
"""Gopher's."""
SHORT_LINE = 30
"""Characters of a line that FineWeb calls short."""
_BULLETS = ("•", "‣", "▪", "◦", "●", "○", "-", "*")
_ELLIPSES = ("...", "…")
_MARKS = (".", "!", "?", '"', "'", "”", "’", "。", "！", "？", "…")
_SENTENCE = re.compile(r"[.!?](?=\s|\Z)|[。！？]")
_LETTER = re.compile(r"[^\W\d_]")
_SYMBOL = re.compile(r"#|\.\.\.|…")


class Measured:
    """A text, and what several measures need of it. Each part is made when it is first asked for."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not blank, without the blanks at their ends."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [one for one in map(str.strip, re.split(r"\n{2,}", self.text)) if one]


def _chars(m: Measured) -> float:
    return len(m.text)


def _words(m: Measured) -> float:
    return len(m.words)


def _mean_word_chars(m: Measured) -> float:
    return sum(map(len, m.words)) / max(1, len(m.words))


def _symbol_share(m: Measured) -> float:
    return len(_SYMBOL.findall(m.text)) / max(1, len(m.words))


def _bullet_lines(m: Measured) -> float:
    return sum(line.startswith(_BULLETS) for line in m.lines) / max(1, len(m.lines))


def _ellipsis_lines(m: Measured) -> float:
    return sum(line.endswith(_ELLIPSES) for line in m.lines) / max(1, len(m.lines))


def _alphabetic_words(m: Measured) -> float:
    return sum(1 for word in m.words if _LETTER.search(word)) / max(1, len(m.words))


def _stop_words(m: Measured) -> float:
    return len(STOP_WORDS.intersection(word.lower() for word in m.words))


def _repeated(parts: Sequence[str]) -> tuple[float, int]:
    """(share of the parts that occurred before, characters of these)."""
    seen: set[str] = set()
    num, chars = 0, 0
    for part in parts:
        if part in seen:
            num += 1
            chars += len(part)
        seen.add(part)
    return num / max(1, len(parts)), chars


def _duplicate_lines(m: Measured) -> float:
    return _repeated(m.lines)[0]


def _duplicate_line_chars(m: Measured) -> float:
    return _repeated(m.lines)[1] / max(1, sum(map(len, m.lines)))


def _duplicate_paragraphs(m: Measured) -> float:
    return _repeated(m.paragraphs)[0]


def _duplicate_paragraph_chars(m: Measured) -> float:
    return _repeated(m.paragraphs)[1] / max(1, sum(map(len, m.paragraphs)))


def _top_gram_chars(m: Measured, n: int) -> float:
    """Share of the words' characters that is in the most frequent run of `n` words; 0 where none occurs twice."""
    grams = Counter(zip(*(m.words[i:] for i in range(n)), strict=False))
    if not grams:
        return 0.0
    gram, count = grams.most_common(1)[0]
    return 0.0 if count < 2 else min(1.0, count * sum(map(len, gram)) / max(1, sum(map(len, m.words))))


def _duplicate_gram_chars(m: Measured, n: int) -> float:
    """Share of the words' characters in runs of `n` words that occurred before; no character counts twice."""
    words, seen = m.words, set()
    chars, at = 0, 0
    while at + n <= len(words):
        gram = tuple(words[at : at + n])
        if gram in seen:
            chars += sum(map(len, gram))
            at += n
        else:
            seen.add(gram)
            at += 1
    return chars / max(1, sum(map(len, words)))


def _punctuated_lines(m: Measured) -> float:
    return sum(line.endswith(_MARKS) for line in m.lines) / max(1, len(m.lines))


def _short_lines(m: Measured) -> float:
    return sum(len(line) <= SHORT_LINE for line in m.lines) / max(1, len(m.lines))


def _sentences(m: Measured) -> float:
    return len(_SENTENCE.findall(m.text))


def _curly_brackets(m: Measured) -> float:
    return m.text.count("{") + m.text.count("}")


MEASURES: dict[str, Callable[[Measured], float]] = {
    "chars": _chars,
    "words": _words,
    "mean_word_chars": _mean_word_chars,
    "symbol_share": _symbol_share,
    "bullet_lines": _bullet_lines,
    "ellipsis_lines": _ellipsis_lines,
    "alphabetic_words": _alphabetic_words,
    "stop_words": _stop_words,
    "duplicate_lines": _duplicate_lines,
    "duplicate_line_chars": _duplicate_line_chars,
    "duplicate_paragraphs": _duplicate_paragraphs,
    "duplicate_paragraph_chars": _duplicate_paragraph_chars,
    "top_2gram_chars": lambda m: _top_gram_chars(m, 2),
    "top_3gram_chars": lambda m: _top_gram_chars(m, 3),
    "top_4gram_chars": lambda m: _top_gram_chars(m, 4),
    "duplicate_5gram_chars": lambda m: _duplicate_gram_chars(m, 5),
    "duplicate_10gram_chars": lambda m: _duplicate_gram_chars(m, 10),
    "punctuated_lines": _punctuated_lines,
    "short_lines": _short_lines,
    "sentences": _sentences,
    "curly_brackets": _curly_brackets,
}
"""By name; a setting `min_NAME` or `max_NAME` of [rules] is a rule over it."""

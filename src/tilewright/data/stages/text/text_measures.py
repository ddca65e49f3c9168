"""Numbers of a text that rules compare with thresholds; each names the paper that its rule is from.

Gopher: Rae et al. 2021 (arXiv 2112.11446, appendix A1.1). C4: Raffel et al. 2020 (arXiv 1910.10683, section 2.2).
FineWeb: Penedo et al. 2024 (arXiv 2406.17557, section 3.6). Words are what stands between white space.

Runs of words are compared by 64-bit hashes in numpy: two different runs of a text are taken for one with a probability
of 2^-63 a pair. What depends on a word alone is looked up once for each different word.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from tilewright.data.common.hashing import mix64

STOP_WORDS = frozenset(("the", "be", "to", "of", "and", "that", "have", "with"))
"""Gopher's."""
SHORT_LINE = 30
"""Characters of a line that FineWeb calls short."""
_BULLETS = ("•", "‣", "▪", "◦", "●", "○", "-", "*")
_ELLIPSES = ("...", "…")
_MARKS = (".", "!", "?", '"', "'", "”", "’", "。", "！", "？", "…")
_SENTENCE = re.compile(r"[.!?](?=\s|\Z)|[。！？]")
_LETTER = re.compile(r"[^\W\d_]")
_BASE = 0x9E3779B97F4A7C15
"""Odd factor of the polynomial that a run of words is hashed by, modulo 2^64."""


class Measured:
    """A text, and what several measures need of it. Each part is made when it is first asked for."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def different(self) -> dict[str, int]:
        """Measure of words: each different one and its number, in the order in which they first occur."""
        return {word: number for number, word in enumerate(dict.fromkeys(self.words))}

    @cached_property
    def ends(self) -> np.ndarray:
        """Measure of characters: of the first 0, 1, ... words together, int64 [words + 1]."""
        return np.cumsum(np.fromiter(map(len, ("", *self.words)), np.int64, len(self.words) + 1))

    def per_word(self, of: Callable[[str], bool]) -> int:
        """Measure per word: how many words have a property of the word alone."""
        has = np.fromiter(map(of, self.different), bool, len(self.different))
        return int(has[self._numbers].sum())

    def runs(self, n: int) -> np.ndarray:
        """Measure of runs: hash of each run of `n` words, uint64 [words - n + 1]; none where there are fewer words."""
        if n > len(self.words):
            return np.zeros(0, np.uint64)
        if n not in self._runs:
            head = n // 2
            tail = n - head
            first, second = self.runs(head), self.runs(tail)
            factor = np.uint64(pow(_BASE, tail, 1 << 64))
            self._runs[n] = first[: len(first) - tail] * factor + second[head:]
        return self._runs[n]

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.fromiter(map(self.different.__getitem__, self.words), np.int64, len(self.words))

    @cached_property
    def _runs(self) -> dict[int, np.ndarray]:
        return {1: mix64(self._numbers.astype(np.uint64))}

    @cached_property
    def lines(self) -> list[str]:
        """Measure of lines: those that are not blank, without the blanks at their ends."""
        return [line for line in map(str.strip, self.text.split("\n")) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        return [one for one in map(str.strip, re.split(r"\n{2,}", self.text)) if one]


def _chars(m: Measured) -> float:
    return len(m.text)


def _words(m: Measured) -> float:
    return len(m.words)


def _mean_word_chars(m: Measured) -> float:
    return int(m.ends[-1]) / max(1, len(m.words))


def _symbol_share(m: Measured) -> float:
    symbols = m.text.count("#") + m.text.count("...") + m.text.count("…")
    return symbols / max(1, len(m.words))


def _bullet_lines(m: Measured) -> float:
    return sum(line.startswith(_BULLETS) for line in m.lines) / max(1, len(m.lines))


def _ellipsis_lines(m: Measured) -> float:
    return sum(line.endswith(_ELLIPSES) for line in m.lines) / max(1, len(m.lines))


def _alphabetic_words(m: Measured) -> float:
    return m.per_word(lambda word: word.isalpha() or _LETTER.search(word) is not None) / max(1, len(m.words))


def _stop_words(m: Measured) -> float:
    return len(STOP_WORDS.intersection(map(str.lower, m.different)))


def _repeated_parts(parts: Sequence[str]) -> tuple[float, int]:
    """Measure of repeated parts: (share of the parts that occurred before, characters of these)."""
    seen: set[str] = set()
    num, chars = 0, 0
    for part in parts:
        if part in seen:
            num += 1
            chars += len(part)
        seen.add(part)
    return num / max(1, len(parts)), chars


def _duplicate_lines(m: Measured) -> float:
    return _repeated_parts(m.lines)[0]


def _duplicate_line_chars(m: Measured) -> float:
    return _repeated_parts(m.lines)[1] / max(1, sum(map(len, m.lines)))


def _duplicate_paragraphs(m: Measured) -> float:
    return _repeated_parts(m.paragraphs)[0]


def _duplicate_paragraph_chars(m: Measured) -> float:
    return _repeated_parts(m.paragraphs)[1] / max(1, sum(map(len, m.paragraphs)))


def _top_gram_chars(m: Measured, n: int) -> float:
    """Measure of the top gram: share of the words' characters that is in the most frequent run of `n` words, the first
    such; 0 where none occurs twice."""
    runs = m.runs(n)
    in_order = np.sort(runs)
    same = in_order[1:] == in_order[:-1]
    if not same.any():
        return 0.0
    begins = np.flatnonzero(np.concatenate([[True], ~same, [True]]))
    counts = np.diff(begins)
    most = int(counts.max())
    first = int(np.flatnonzero(_is_in(runs, in_order[begins[:-1][counts == most]]))[0])
    return min(1.0, most * int(m.ends[first + n] - m.ends[first]) / max(1, int(m.ends[-1])))


def _duplicate_gram_chars(m: Measured, n: int) -> float:
    """Measure of duplicate grams: share of the words' characters in runs of `n` words that occurred before; no
    character counts twice."""
    runs = m.runs(n)
    in_order = np.sort(runs)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(twice):
        return 0.0
    at = np.flatnonzero(_is_in(runs, twice))  # no other run can have occurred before, or occurs again
    chars, next_, seen = 0, 0, set()
    for start, run, size in zip(at.tolist(), runs[at].tolist(), (m.ends[at + n] - m.ends[at]).tolist(), strict=True):
        if start < next_:
            continue
        if run in seen:
            chars += size
            next_ = start + n
        else:
            seen.add(run)
    return chars / max(1, int(m.ends[-1]))


def _is_in(values: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Which of `values` are in the sorted array `some` of a text's measure, which has one at least."""
    return some[np.minimum(np.searchsorted(some, values), len(some) - 1)] == values


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

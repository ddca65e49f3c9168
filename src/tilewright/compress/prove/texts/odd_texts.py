"""Texts on which tokenizers differ: a proof asks for their ids beside those of held-out documents.

Held-out documents are kept as ids, so what is asked of them is text that the run's tokenizer has normalised and split
already. These are generated, the same ones every time: characters that have several encodings, words of several
scripts, runs of blanks, line ends, marks without a letter, numbers that are no ASCII digits, names of special tokens.
"""

import random
from collections.abc import Sequence

NUM_TEXTS = 256
_MOST_PIECES = 7
_SEED = 20_260_101

_COMPOSED = (
    "é",
    "e\u0301",
    "ñ",
    "n\u0303",
    "ö",
    "o\u0308",
    "ộ",
    "o\u0302\u0323",
    "o\u0323\u0302",
    "Å",
    "A\u030a",
    "\u212b",
)
"""Letters with marks: composed, decomposed, with marks in either order, and a sign that only looks like one."""
_CJK = (
    "\uf900",
    "豈",
    "\ufa10",
    "塚",
    "ｶﾞ",
    "ガ",
    "が",
    "か\u3099",
    "한",
    "\u1112\u1161\u11ab",
    "日本語、",
    "ﬁn",
    "①",
    "㍍",
    "Ｆ１",
)
"""Compatibility forms, half and full widths, Hangul in syllables and in letters."""
_EMOJI = ("👩\u200d👩\u200d👧", "🏳️\u200d🌈", "👍🏽", "🇩🇪", "1️⃣", "☺\ufe0e", "\U0001fae0", "👩\u200d")
_BLANKS = ("  ", "   ", "\t", "\t \t", "\u00a0", "\u2003", "\u3000", " \u00a0 ", "\u200b", "\ufeff", "\u0085", "\u2028")
_LINES = ("\n", "\r\n", "\r", "\n\n\n", " \n", "\r\n\r\n", "\n \n", "\n\t", "\v", "\f")
_MARKS = (
    "\u0301",
    "\u0308x",
    " \u0323",
    "\ufffd",
    "\ufffd\ufffd",
    "\u200d",
    "\u00ad",
    "\u202e",
    "\U000e0041",
    "\x1b[0m",
    "\x7f",
)
"""Marks without a letter, the replacement of bytes that are no text, controls."""
_NUMBERS = ("0", "12", "345", "6789", "٣٤٥", "४२", "²³", "½", "Ⅷ", "1,234.5e-6", "0x1F", "𝟙𝟚")
_WORDS = (
    *("don't", "I'LL", "we're", "X'S", "ſ'ſ", "it’s", "naïve", "STRASSE", "straße", "ÅNGSTRÖM", "İstanbul", "ΑΣ", "ας"),
    *("हिन्दी", "ไทย", "עִבְרִית", "العَرَبِيَّة", "Việt", "foo_bar", "camelCase", "__init__", "C++", "λx.x", "𝕏𝒴", "ａｂｃ"),
)
_PUNCTUATION = (
    "...",
    "—",
    "!!",
    "?!",
    " (",
    ")",
    "//",
    "<|",
    "|>",
    "<|eos|>",
    "</s>",
    "[MASK]",
    "{}",
    "\\",
    "$",
    "€",
    "'",
)
_KINDS: Sequence[Sequence[str]] = (
    *(_COMPOSED, _CJK, _EMOJI, _BLANKS, _LINES, _MARKS, _NUMBERS, _WORDS, _PUNCTUATION),
    (" ", "a", "hello", " the", "return", "="),
)


def odd_texts(count: int = NUM_TEXTS) -> list[str]:
    """Make distinct odd texts on which tokenizers differ, the same on every machine: each piece once alone, then
    mixtures.

    Example:
        >>> texts = odd_texts()
        >>> len(texts), len(set(texts)), texts == odd_texts(), all(text == text.encode().decode() for text in texts)
        (256, 256, True, True)
    """
    draw = random.Random(_SEED)
    found = dict.fromkeys(piece for kind in _KINDS for piece in kind)
    while len(found) < count:
        kinds = draw.choices(_KINDS, k=draw.randint(2, _MOST_PIECES))
        found["".join(draw.choice(kind) for kind in kinds)] = None
    return list(found)[:count]

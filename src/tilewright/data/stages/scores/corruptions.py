"""Noise made from clean text, of kinds that raw text has. The same text and key give the same noise everywhere."""

import base64
import re
from collections.abc import Callable

import numpy as np

from tilewright.data.common.hashing import hash64

_CONFUSED = dict(zip("lOIeaisStBhgoucnvwyzmrdp", "10lcol5$f8b90vohuvg2ntcq", strict=True))
"""Letters as a scan of a bad print has them."""
_SYMBOLS = "!#$%&()*+,-./:;<=>?@[]^_{|}~¤¦§¨±·×÷†‡•�"
_SUBSTITUTED, _DELETED, _SPACED = 0.10, 0.12, 0.15
_MENU = (
    *("Home", "About us", "Contact", "Log in", "Sign up", "Privacy policy", "Terms of use", "Cookies", "Sitemap"),
    *("Read more", "Share", "Next", "Previous", "Back to top", "Subscribe", "Newsletter", "All rights reserved"),
    *("Add to cart", "Skip to content", "Search", "FAQ", "Help", "Comments (0)", "Reply", "Categories", "Tags"),
)
_BETWEEN = (" | ", " · ", " » ", "\n", "  ", " / ", "\n* ", "\n- ")
_MENU_CHARS = 4000


def shuffled(text: str, key: int) -> str:
    """Corrupt a text by shuffling its words; white space stays where it is.

    Example:
        >>> shuffled("one two three\\nfour five", 4).split() == "one two three four five".split()
        False
    """
    parts = re.split(r"(\s+)", text)
    words = parts[::2]
    order = np.argsort(hash64(key, np.arange(len(words))), kind="stable")
    parts[::2] = [words[i] for i in order.tolist()]
    return "".join(parts)


def misread(text: str, key: int) -> str:
    """Corrupt a text as a bad scan does: a tenth of the characters taken for others, a few lost, a few blanks put
    in."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    roll = (hash64(key, np.arange(len(codes))) >> np.uint64(11)) / 2**53
    confused = np.arange(128, dtype="<u4")
    for letter, other in _CONFUSED.items():
        confused[ord(letter)] = ord(other)
    small = np.minimum(codes, 127)
    changed = np.where((roll < _SUBSTITUTED) & (codes < 128), confused[small], codes)
    times = np.where(
        (roll >= _SUBSTITUTED) & (roll < _DELETED), 0, np.where((roll >= _DELETED) & (roll < _SPACED), 2, 1)
    )
    repeated = np.repeat(changed, times)
    repeated[np.cumsum(times)[times == 2] - 1] = ord(" ")
    return repeated.astype("<u4").tobytes().decode("utf-32-le")


def menu(text: str, key: int) -> str:
    """Corrupt a text to links of menus, footers and lists of posts, about as long as the text, with words of it in
    between."""
    words = re.findall(r"\w{3,}", text[:_MENU_CHARS]) or ["Item"]
    draws = iter(hash64(key, np.arange(2 * _MENU_CHARS)).tolist())
    parts: list[str] = []
    size, most = 0, min(len(text), _MENU_CHARS)
    while size < most:
        kind, draw = next(draws) % 10, next(draws)
        if kind < 6:
            part = _MENU[draw % len(_MENU)]
        elif kind < 9:
            at = draw % len(words)
            part = " ".join(words[at : at + 1 + draw // 97 % 3]).title()
        else:
            part = f"{draw % 28 + 1}.{draw // 31 % 12 + 1}.20{draw // 1009 % 30:02}"
        parts += [part, _BETWEEN[draw // 7919 % len(_BETWEEN)]]
        size += len(parts[-1]) + len(part)
    return "".join(parts)


def encoded(text: str, key: int) -> str:
    """Corrupt a text by encoding it as base64 or as hexadecimal numbers, in lines."""
    data = text.encode()
    if key % 2:
        return base64.encodebytes(data).decode()
    return "\n".join(data[i : i + 32].hex(" ", 2) for i in range(0, len(data), 32))


def symbols(text: str, key: int) -> str:
    """Corrupt a text to random punctuation and signs; white space stays where it is."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    known = np.frombuffer(_SYMBOLS.encode("utf-32-le"), "<u4")
    drawn = known[(hash64(key, np.arange(len(codes))) % np.uint64(len(known))).astype(np.int64)]
    space = np.isin(codes, np.frombuffer(" \n\t\r".encode("utf-32-le"), "<u4"))
    return np.where(space, codes, drawn).astype("<u4").tobytes().decode("utf-32-le")


KINDS: dict[str, Callable[[str, int], str]] = {
    "shuffled": shuffled,
    "ocr": misread,
    "boilerplate": menu,
    "encoded": encoded,
    "symbols": symbols,
}
"""By the names that `noise.kinds` has for them."""

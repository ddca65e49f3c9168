"""Bytes of text in whatever encoding, as text: marked, declared, found, or mixed line by line. And mojibake, undone.

UTF-8 is taken for UTF-8; of other bytes `detect_encoding` finds the encoding. Where nothing fits, nothing is guessed.
Mojibake (UTF-8 that was read as a legacy encoding) is undone by ftfy, line by line, and only in lines that a cheap test
suspects: ftfy reads 3 MB/s.
"""

import re
from typing import NamedTuple

from tilewright.data.readers.text.detect_encoding import CONTROL, find_encoding, try_decode
from tilewright.data.sources.source_parts import wide_encoding

_DAMAGED_SHARE = 0.1
"""Share of lines that do not decode up to which a declared encoding is taken, and the lines are lost."""
_MIXED_SHARE = 0.1
"""Share of lines that are not UTF-8 up to which the others are read as UTF-8 all the same."""
_CP1252 = (
    "\x80-\xbf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018\u2019"
    "\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178"
)
"""What the bytes 0x80 to 0xbf are in Latin-1 and in Windows-1252."""
_CHINESE, _LEAST_CHINESE = re.compile(r"[\u4e00-\u9fff]"), 4
"""Characters, and how many of them tell HZ (RFC 1843), whose bytes are those of ASCII, from a text with a `~{`."""
_SUSPECT = re.compile(
    rf"[\xc2-\xdf\u0102\u0139][{_CP1252}\u0105\u0142]|[\xe0-\xef][{_CP1252}]{{2}}|\xf0[{_CP1252}]{{3}}"
    r"|(?:[\u0420\u0421][\u0400-\u040f\u0450-\u045f\xa0-\xbf\u0401\u0404\u0406\u0407\u2010-\u203a\u20ac\u2116\u2122]){2}"
    r"|\u221a[\xa9\xae\xb0\u2020\u2202\xfc]"
)


def wide_encoding_of(head: bytes) -> str:
    """The encoding of UTF-16 or UTF-32 text that begins with `head`, with a byte-order mark or without; "" for others.

    Without a mark it shows in the NULs that spaces, line ends, digits and punctuation have.

    Example:
        >>> [wide_encoding_of("a b".encode(name)) for name in ("utf-16-le", "utf-32-be", "utf-16", "utf-8")]
        ['utf-16-le', 'utf-32-be', 'utf-16', '']
    """
    marked = wide_encoding(head)
    if marked or b"\0" not in head:
        return marked
    head = head[: len(head) & ~3] if len(head) >= 4 else head
    found = {}
    for name in ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"):
        try:
            text = head.decode(name)
        except UnicodeDecodeError as error:
            if error.start < len(head) - 4:
                continue
            text = head[: error.start].decode(name)
        common = sum(map(text.count, " \n\t.,0123456789\u3000\u3002"))
        if text and not CONTROL.search(text) and common >= 0.02 * len(text):
            found[name] = common + 0.5 * sum(c.isascii() for c in text)
    return max(found, key=lambda name: found[name], default="")


def begins_as_utf8(head: bytes) -> bool:
    """True if the beginning of a file is in the encoding UTF-8; a character at its end may be cut.

    Example:
        >>> begins_as_utf8("né".encode()[:2]), begins_as_utf8("né ".encode("latin-1"))
        (True, False)
    """
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 3 and error.reason == "unexpected end of data"
    return True


class Decoded(NamedTuple):
    """Text, the encodings that it was in ("utf-8", "utf-8 + koi8_r"), the lines that are in none and not in the text,
    and an encoding that may be meant as well."""

    text: str
    encoding: str
    lost: list[bytes]
    doubt: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """Facts of a record on the encoding of its text."""
        return {"encoding": self.encoding} | ({"encoding_doubt": self.doubt} if self.doubt else {})


def decode_text(data: bytes, hint: str = "") -> Decoded:
    """Decode bytes in any encoding to text.

    Args:
        data: bytes that are not UTF-16, UTF-32 or binary, whole lines.
        hint: a codec that the document declares, or that an earlier part of the file is in: taken where all but a few
            lines fit. UTF-8 goes before it.

    Returns:
        The text without the lost lines. Where no encoding fits, all lines are lost.
    """
    if b"\x1b$" in data:  # ISO-2022 writes everything with the bytes of ASCII; the Korean one says so first
        for name in ("iso2022_kr", "iso2022_jp_2") if b"\x1b$)C" in data else ("iso2022_jp_2", "iso2022_kr"):
            text = try_decode(data, name)
            if text is not None:
                return Decoded(text, name, [])
    if b"~{" in data and (text := try_decode(data, "hz")) is not None and len(_CHINESE.findall(text)) >= _LEAST_CHINESE:
        return Decoded(text, "hz", [])
    try:
        return Decoded(data.decode("utf-8"), "utf-8", [])
    except UnicodeDecodeError:
        end = b"\n" if b"\n" in data or b"\r" not in data else b"\r"  # which alone ended lines on old Macs
        lines = data.split(end)
    bad = [number for number, line in enumerate(lines) if not _is_utf8(line)]
    doubt, legacy = "", hint
    if not hint or hint == "utf_8" or sum(try_decode(lines[i], hint) is None for i in bad) > _DAMAGED_SHARE * len(bad):
        legacy, doubt = find_encoding(b"\n".join(lines[number] for number in bad))
    if len(bad) > _MIXED_SHARE * len(lines):
        whole = try_decode(data, legacy) if legacy else None
        if whole is not None:
            return Decoded(whole, legacy, [], doubt)
        if not legacy:
            return Decoded("", "", lines)
        bad, good = list(range(len(lines))), set()
    else:
        good = set(range(len(lines))).difference(bad)
    texts, lost = [], []
    for number, line in enumerate(lines):
        text = line.decode("utf-8") if number in good else try_decode(line, legacy) if legacy else None
        if text is None:
            lost.append(line)
        else:
            texts.append(text)
    names = (["utf-8"] if good else []) + ([legacy] if len(lost) < len(bad) else [])
    return Decoded(end.decode().join(texts), " + ".join(names), lost, doubt)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def is_suspect(text: str) -> bool:
    """True if `text` in some encoding may hold mojibake: a cheap test, which ftfy then decides.

    Example:
        >>> is_suspect("café"), is_suspect("cafÃ©"), is_suspect("donâ€™t")
        (False, True, True)
    """
    return not text.isascii() and _SUSPECT.search(text) is not None


def undo_mojibake(text: str) -> tuple[str, int]:
    """Undo mojibake of a wrong encoding: `text` with its suspect lines as they were before they were decoded wrongly,
    and how many of them changed.

    Example:
        >>> undo_mojibake("cafÃ©\\ncafé")
        ('café\\ncafé', 1)
    """
    from ftfy import fix_encoding

    lines, changed = text.split("\n"), 0
    for number, line in enumerate(lines):
        if is_suspect(line):
            fixed = fix_encoding(line)
            changed += fixed != line
            lines[number] = fixed
    return "\n".join(lines), changed

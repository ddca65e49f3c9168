"""The output of a data source: parts that can be read, and the records or rejects that come out of them.

Also the two steps every text goes through: bytes to text (`decode`) and long text to pieces (`cut`).
Nothing here guesses an encoding: text is UTF-8, or says otherwise with a byte-order mark.
"""

import codecs
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tilewright.data.common.records import Record, Rejected, rejected, text_of
from tilewright.data.sources.path_purpose import Wanted, wanted

MAX_DOCUMENT_CHARS = 65_536
"""Longer texts are cut into documents of at most this many characters, at a blank line where there is one."""

BINARY_HEAD = 8192
"""Bytes at the beginning of a document by which it is text or binary."""
_BAD_LINE_SHARE = 0.1
_CONTROL = bytes(set(range(32)) - {8, 9, 10, 11, 12, 13, 27})
_MARKS = {  # in this order: UTF-32's little-endian mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class Part:
    """A piece of a data source that is read, or left unread, as a whole. `size` is its text in bytes, about.

    `file` is the key of `Source.files` for the file that it is of, "" where that is the part's own name.
    """

    domain: str
    name: str
    size: int
    read: Callable[[], Iterator[Record | Rejected]]
    file: str = ""


@dataclass(frozen=True)
class Source:
    """All parts of a data source, found without reading their text.

    `key` changes whenever the content may have changed. `rejects` are what was refused while looking. `files` has the
    size in bytes of everything that was found: each is in a part, in a reject, or both. `wanted` is what it is read
    for.
    """

    label: str
    key: str
    parts: tuple[Part, ...]
    rejects: tuple[Rejected, ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)
    wanted: Wanted = field(default_factory=partial(wanted, "text"), compare=False)


def wide_encoding(data: bytes) -> str:
    """The wide encoding of a source's document that a byte-order mark at the start of `data` says, "" for UTF-8 and
    where there is none.

    Example:
        >>> wide_encoding("a".encode("utf-16")), wide_encoding("a".encode("utf-32")), wide_encoding(b"a")
        ('utf-16', 'utf-32', '')
    """
    return next((name for mark, name in _MARKS.items() if data.startswith(mark)), "")


def printable(text: str) -> str:
    """`text` of a source's document as UTF-8 can hold it and a terminal show it: other bytes, control characters and
    backslashes escaped.

    Two different texts stay different.

    Example:
        >>> printable("caf\\udce9\\n.txt"), printable("café.txt")
        ('caf\\\\xe9\\\\n.txt', 'café.txt')
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(_escape(c) for c in text)


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable() and character != "\\":
        return character
    if "\x80" <= character <= "\xff":  # not to be taken for such a byte
        return f"\\u{ord(character):04x}"
    return character.encode("unicode_escape").decode("ascii")


def decode(name: str, data: bytes, part: str = "") -> Iterator[Record | Rejected]:
    """Decode a file of a source to one record of text; anything but text becomes a reject.

    A file with a few lines that are not UTF-8 keeps its other lines; above a tenth it is set aside whole.

    Args:
        name: of the file.
        data: its bytes, or those of a part of it.
        part: where that part is; "": the bytes are the whole file.

    Example:
        >>> [record.text for record in decode("a.txt", b"caf\\xc3\\xa9")]
        ['café']
        >>> [reject.rule for reject in decode("b.bin", b"\\x00\\x01")]
        ['binary, not text']
    """
    if not data:
        return
    wide = wide_encoding(data)
    try:
        data = data.decode(wide).encode() if wide else data.removeprefix(codecs.BOM_UTF8)
    except UnicodeDecodeError as error:
        yield not_as_marked(name, wide, error.reason, len(data))
        return
    yield from decode_unmarked(name, data, part)


def decode_unmarked(name: str, data: bytes, part: str) -> Iterator[Record | Rejected]:
    """`decode` for UTF-8 whose byte-order mark was taken off: one that follows it is text."""
    if looks_binary(data):
        yield rejected(name, "binary, not text", part=part, num_bytes=len(data))
        return
    try:
        yield text_of(name, data.decode("utf-8"), part)
    except UnicodeDecodeError:
        yield from _keep_good_lines(name, data, part)


def not_as_marked(name: str, encoding: str, why: str, num_bytes: int = 0) -> Rejected:
    """The reject of a source's document that is not in the encoding that its byte-order mark says."""
    mark = encoding.upper()
    return rejected(name, f"not the {mark} that its byte-order mark says", why, num_bytes=num_bytes)


def _keep_good_lines(name: str, data: bytes, part: str) -> Iterator[Record | Rejected]:
    good, bad, lost, example = [], 0, 0, ""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            good.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad += 1
            lost += len(line) + 1
            example = example or f"line {number}: byte 0x{line[error.start]:02x}"
    if bad > _BAD_LINE_SHARE * len(lines):
        yield rejected(name, "not UTF-8", example, part=part, num_bytes=len(data))
        return
    yield rejected(name, "line is not UTF-8", example, part=part, count=bad, num_bytes=lost)
    yield text_of(name, "\n".join(good), part)


def looks_binary(data: bytes) -> bool:
    """True where a source's document looks binary: the first 8 KiB hold a NUL, or more than a tenth control characters.

    Args:
        data: of UTF-8, or another encoding with the signs of ASCII; text of UTF-16 and UTF-32 as UTF-8.

    Example:
        >>> looks_binary(b"plain text\\n"), looks_binary(b"PK\\x03\\x04\\x00")
        (False, True)
    """
    head = data[:BINARY_HEAD]
    return b"\0" in head or len(head) - len(head.translate(None, _CONTROL)) > 0.1 * len(head)


def cut(record: Record, max_chars: int = MAX_DOCUMENT_CHARS) -> Iterator[Record]:
    """Cut a source's document into pieces of at most `max_chars`, after a blank line, else a line, else anywhere.
    Pieces are numbered in `part`.

    Example:
        >>> [piece.text for piece in cut(text_of("x", "one two\\n\\nthree\\nfour"), 12)]
        ['one two\\n\\n', 'three\\nfour']
    """
    text = record.text
    if len(text) <= max_chars:
        yield record
        return
    start = number = 0
    while start < len(text):
        end = _cut_point(text, start, max_chars)
        number += 1
        yield replace(record, text=text[start:end], part=f"{record.part}#{number}")
        start = end


def _cut_point(text: str, start: int, max_chars: int) -> int:
    limit = start + max_chars
    if limit >= len(text):
        return len(text)
    half = start + max_chars // 2
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, half, limit)
        if found >= 0:
            return found + len(mark)
    return limit

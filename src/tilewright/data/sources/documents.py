"""What a data source hands over: parts that can be read, and the documents or rejects that come out of them.

Also the two steps every text goes through: bytes to text (`decode`) and long text to pieces (`cut`).
Nothing here guesses an encoding: text is UTF-8, or says otherwise with a byte-order mark.
"""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_DOCUMENT_CHARS = 65_536
"""Longer texts are cut into documents of at most this many characters, at a blank line where there is one."""

_BAD_LINE_SHARE = 0.1
_CONTROL = bytes(set(range(32)) - {8, 9, 10, 11, 12, 13, 27})
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True)
class Document:
    """One text. `name` says where it comes from, for a person to find it again."""

    name: str
    text: str


@dataclass(frozen=True)
class Reject:
    """Something set aside: `count` lines, rows or files of `where` that share one `reason`."""

    where: str
    reason: str
    count: int = 1
    example: str = ""


@dataclass(frozen=True)
class Part:
    """A piece of a source that is read, or left unread, as a whole. `size` is its text in bytes, about."""

    domain: str
    name: str
    size: int
    read: Callable[[], Iterator[Document | Reject]]


@dataclass(frozen=True)
class Source:
    """All parts of a source, found without reading their text.

    `key` changes whenever the content may have changed. `rejects` are what was set aside while looking.
    """

    label: str
    key: str
    parts: tuple[Part, ...]
    rejects: tuple[Reject, ...] = ()


def decode(name: str, data: bytes) -> Iterator[Document | Reject]:
    """The text of a file as one document; what is not text comes out as a reject.

    A file with a few lines that are not UTF-8 keeps its other lines; above a tenth it is set aside whole.

    Example:
        >>> list(decode("a.txt", b"caf\\xc3\\xa9"))
        [Document(name='a.txt', text='café')]
        >>> [r.reason for r in decode("b.bin", b"\\x00\\x01")]
        ['binary, not text']
    """
    if data.startswith(UTF16_MARKS):
        try:
            yield Document(name, data.decode("utf-16"))
        except UnicodeDecodeError as error:
            yield Reject(name, "not the UTF-16 that its byte-order mark says", example=error.reason)
        return
    data = data.removeprefix(codecs.BOM_UTF8)
    if looks_binary(data):
        yield Reject(name, "binary, not text")
        return
    try:
        yield Document(name, data.decode("utf-8"))
    except UnicodeDecodeError:
        yield from _keep_good_lines(name, data)


def _keep_good_lines(name: str, data: bytes) -> Iterator[Document | Reject]:
    good, bad, example = [], 0, ""
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            good.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad += 1
            example = example or f"line {number}: byte 0x{line[error.start]:02x}"
    if bad > _BAD_LINE_SHARE * len(lines):
        yield Reject(name, "not UTF-8", example=example)
        return
    yield Reject(name, "line is not UTF-8", bad, example)
    yield Document(name, "\n".join(good))


def looks_binary(data: bytes) -> bool:
    """True where the first 8 KiB hold a NUL, or more than a tenth control characters.

    Example:
        >>> looks_binary(b"plain text\\n"), looks_binary(b"PK\\x03\\x04\\x00")
        (False, True)
    """
    head = data[:8192]
    return b"\0" in head or len(head) - len(head.translate(None, _CONTROL)) > 0.1 * len(head)


def cut(document: Document, max_chars: int = MAX_DOCUMENT_CHARS) -> Iterator[Document]:
    """The document in pieces of at most `max_chars`, cut after a blank line, else a line, else anywhere.

    Example:
        >>> [d.text for d in cut(Document("x", "one two\\n\\nthree\\nfour"), 12)]
        ['one two\\n\\n', 'three\\nfour']
    """
    text = document.text
    if len(text) <= max_chars:
        yield document
        return
    start = number = 0
    while start < len(text):
        end = _cut_point(text, start, max_chars)
        number += 1
        yield Document(f"{document.name}#{number}", text[start:end])
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

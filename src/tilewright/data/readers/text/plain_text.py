"""Plain text and Markdown in pieces of about 1 MiB at line ends, each with its bytes of the file.

`data[start:stop]`, decoded with the fact `encoding`, is the record's text, unless lines were lost or mojibake was
undone (fact `repaired`). Markdown stays as it is, which is how models should write it; only front matter is cut off.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from tilewright.data.common.records import BLANK, HALF_PAIR, Record, Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.text.decode_text import decode_text, is_suspect, undo_mojibake, wide_encoding_of
from tilewright.data.readers.text.detect_encoding import declared_encoding
from tilewright.data.sources.file_lines import segment_lines
from tilewright.data.sources.source_parts import BINARY_HEAD, looks_binary

BLOCK_BYTES = 1 << 20
"""Text of a large file comes in records of about this size."""
END_OF_FILE = b"\x1a"
"""With which programs of DOS end a text, or fill up its last block."""
_FRONT_MATTER = re.compile(rb"\A(?:\xef\xbb\xbf)?---[ \t]*\r?\n(.*?\n)??---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_TITLE = re.compile(r"^(?:#[ \t]+|title:[ \t]*)(.{1,200})", re.MULTILINE)

Items = Iterator[Record | Rejected]


def read_text(entry: Entry) -> Items:
    """Read the text of a plain text file."""
    yield from _text(entry, 0, {})


def read_markdown(entry: Entry) -> Items:
    """Read the plain text of a Markdown file after its front matter; its title is a fact of the first record."""
    if entry.span is not None and entry.span.start:
        yield from _text(entry, 0, {})
        return
    with entry.path.open("rb") as file:
        head = file.read(1 << 16)
    front = _FRONT_MATTER.match(head)
    found = _TITLE.search(head.decode("utf-8", "ignore"))
    title = found[1].strip(" \t\r#\"'") if found else ""
    yield from _text(entry, front.end() if front else 0, {"title": title} if title else {})


def _text(entry: Entry, start: int, facts: dict[str, str]) -> Items:
    with entry.path.open("rb") as file:
        head = file.read(1 << 16)
    # UTF-16 and UTF-32: neither blocks nor line ends are found by bytes.
    wide = wide_encoding_of(head)
    if wide:
        yield from _wide(entry, wide, facts)
        return
    size = entry.path.stat().st_size
    if start >= size:
        yield entry.reject(BLANK, 0.0, 1.0, num_bytes=size)
    encoding = declared_encoding(head)
    for at, block in _blocks(entry, start):
        if isinstance(block, Rejected):
            yield block
            continue
        # Marks around text that are none of it: a byte order mark, Ctrl-Z at the end.
        if not at and block.startswith(b"\xef\xbb\xbf"):
            at, block = 3, block[3:]
        if at + len(block) == size:
            block = block.rstrip(END_OF_FILE)
        if looks_binary(block):
            yield binary(entry, len(block))
            continue
        # The encoding of a block is passed on to the next one.
        decoded = decode_text(block, encoding)
        encoding = decoded.encoding.removeprefix("utf-8").removeprefix(" + ") or encoding
        if decoded.lost:
            yield lost_lines(entry, decoded.lost, decoded.encoding)
            if not decoded.encoding:
                continue
        yield from text_record(entry, decoded.text, at, at + len(block), {**decoded.facts, **facts})
        facts = {}


def binary(entry: Entry, num_bytes: int) -> Rejected:
    """The reject of plain text that looks binary."""
    return entry.reject("binary, not text", "NUL or control bytes", "a tenth", num_bytes=num_bytes)


def lost_lines(entry: Entry, lost: list[bytes], found: str) -> Rejected:
    """The reject of lines of plain text that are in no encoding.

    Raises:
        HardwareError: the package that finds encodings is not installed.
    """
    entry.need("charset_normalizer", of_format=False)
    example, num_bytes = ascii(lost[0][:80]), sum(len(line) + 1 for line in lost)
    return entry.reject(
        "unknown encoding", found or "none fits", "all bytes decode", example, count=len(lost), num_bytes=num_bytes
    )


def text_record(entry: Entry, text: str, start: int, stop: int, facts: dict, part: str = "", **fields) -> Items:
    """The record of a plain text that was decoded, with mojibake undone; nothing where it is blank."""
    if is_suspect(text):
        entry.need("ftfy", of_format=False)
        text, lines = undo_mojibake(text)
        facts = facts | ({"repaired": lines} if lines else {})
    try:
        text.encode()
    except UnicodeEncodeError:
        yield entry.reject(HALF_PAIR, "a surrogate", "none", part=part, num_bytes=stop - start)
        return
    if text.strip():
        yield entry.record("text", text, part, start=start, stop=stop, facts=facts, **fields)
    else:
        yield entry.reject(BLANK, 0.0, 1.0, part=part, num_bytes=stop - start)


def _blocks(entry: Entry, start: int) -> Iterator[tuple[int, bytes | Rejected]]:
    """Blocks of plain text: (offset, about `BLOCK_BYTES` of whole lines), or a reject of a line that is too long."""
    size, longest = entry.path.stat().st_size, entry.limits.line_bytes
    if entry.span is not None:
        start, size = max(start, entry.span.start), entry.span.stop
    if entry.span is None and start == 0 and size <= min(BLOCK_BYTES, longest):
        yield 0, entry.path.read_bytes()[:size]
        return
    held: list[bytes] = []
    first = at = start
    for at, line in segment_lines(entry.path, start, size, longest):
        if len(line) > longest:
            if held:
                yield first, b"".join(held)
                held = []
            yield at, entry.reject("line length", _length(entry.path, at), longest, ascii(line[:60]))
            continue
        first = first if held else at
        held.append(line)
        if at + len(line) - first >= BLOCK_BYTES:
            yield first, b"".join(held)
            held = []
    if held:
        yield first, b"".join(held)


def _length(path: Path, start: int) -> float:
    """Bytes of the line of plain text at `start`."""
    length = 0
    with path.open("rb") as file:
        file.seek(start)
        while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
            length += len(piece)
        return float(length + len(piece))


def _wide(entry: Entry, encoding: str, facts: dict[str, str]) -> Items:
    """Plain text of UTF-16 or UTF-32, in pieces that end between two characters, at a line end where there is one."""
    size, at, width = entry.path.stat().st_size, 0, 4 if "32" in encoding else 2
    with entry.path.open("rb") as file:
        encoding, at = _endian(encoding, file.read(4))
        if at >= size:
            yield entry.reject(BLANK, 0.0, 1.0, num_bytes=size)
        while at < size:
            file.seek(at)
            block = file.read(BLOCK_BYTES)
            more = at + len(block) < size
            if more:
                block = block[: _line_end(block, "\n".encode(encoding), width)]
            lost = ""
            try:
                text = block.decode(encoding)
            except UnicodeDecodeError as error:
                if not more or len(block) - error.start > 4:  # not a character that the next piece completes
                    lost = error.reason
                block = block[: error.start]
                text = block.decode(encoding)
            if looks_binary(text[:BINARY_HEAD].encode()):
                yield binary(entry, len(block))
            elif block:
                yield from text_record(entry, text, at, at + len(block), {"encoding": encoding, **facts})
            at, facts = at + len(block), {}
            if lost:
                yield entry.reject(f"not {encoding}", lost, "all bytes decode", num_bytes=size - at)
                return


def _line_end(block: bytes, mark: bytes, width: int) -> int:
    """Where the last line of a `block` of plain text ends, or its length."""
    end = block.rfind(mark)
    while end > 0 and end % width:
        end = block.rfind(mark, 0, end + width - 1)
    return end + width if end > 0 else len(block)


def _endian(encoding: str, head: bytes) -> tuple[str, int]:
    """The codec of wide plain text with its byte order, and the bytes of the mark."""
    if encoding.endswith(("-le", "-be")):
        return encoding, 0
    width = 4 if encoding == "utf-32" else 2
    return f"{encoding}-{'be' if head[0] in (0, 0xFE) else 'le'}", width

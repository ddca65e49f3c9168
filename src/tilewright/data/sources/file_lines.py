"""Lines of files, as bytes, with damage reported instead of raised.

A large plain file is read by segments: a line belongs to the segment that it begins in, so segments can be read in
any order, or left out, and every line is read once. Other files are streamed: a line of them has a greatest length.
"""

from collections.abc import Iterator
from pathlib import Path

from tilewright.core.units import format_bytes
from tilewright.data.common.records import Rejected, rejected
from tilewright.data.sources.decompress import utf8_pieces

LONGEST_LINE = 16 << 20
"""Bytes of the longest line, row or field that is streamed."""


def segment_lines(path: Path, start: int, end: int, longest: int | None = None) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line with its line end) of the lines that begin in [start, end) of a plain file.

    Of a line longer than `longest` comes what is one byte longer than that.
    """
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            _skip_line(file)  # the rest of a line that began earlier; only its line end where `start` begins one
        offset = file.tell()
        while offset < end:
            line = file.readline(-1 if longest is None else longest + 1)
            if not line:
                return
            yield offset, line
            if longest is not None and len(line) > longest and not line.endswith(b"\n"):
                _skip_line(file)
            offset = file.tell()


def _skip_line(file) -> None:
    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass


def streamed_lines(
    name: str, path: Path, longest: int = LONGEST_LINE, *, cut: bool = False
) -> Iterator[bytes | Rejected]:
    """Stream lines of a plain or compressed file. After damage, what came before it stays and one reject says what is
    lost.

    Args:
        name: of the file, for rejects.
        path: the file.
        longest: bytes of the longest line.
        cut: longer lines come in several pieces, cut between UTF-8 characters; False: each is set aside, as a reject.
    """
    held = bytearray()
    skipping = 0
    for piece in utf8_pieces(name, path):
        if isinstance(piece, Rejected):
            yield piece  # what is held is a line cut in two, part of the loss
            return
        for number, part in enumerate(piece.split(b"\n")):
            if number:  # the line before it is whole
                if skipping:
                    yield too_long(name, longest, skipping)
                else:
                    yield bytes(held) + b"\n"
                    held.clear()
                skipping = 0
            if skipping:
                skipping += len(part)
                continue
            held += part
            while cut and len(held) >= longest:
                stop = longest - _open_character(held[longest - 4 : longest])
                yield bytes(held[:stop])
                del held[:stop]
            if len(held) >= longest:
                skipping = len(held)
                held.clear()
    if skipping:
        yield too_long(name, longest, skipping)
    if held:
        yield bytes(held)


def too_long(name: str, longest: int, num_bytes: int) -> Rejected:
    """The reject of a file's line that is too long to be held in memory."""
    return rejected(name, f"line longer than {format_bytes(longest)}", num_bytes=num_bytes)


def _open_character(data: bytearray) -> int:
    """Count the bytes at the end of UTF-8 `data` that begin an incomplete character; 0 where it ends whole."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character: its high bits count the bytes
            return back if back < (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0) + 1 else 0
    return 0

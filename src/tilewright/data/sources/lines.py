"""Lines of plain and compressed files, as bytes, with damage reported instead of raised.

A large plain file is read by segments: a line belongs to the segment that it begins in, so segments can be read in
any order, or left out, and every line is read once.

Compressed files are read in bounded memory, whatever they hold: what is decompressed comes in pieces of a few MiB, a
line has a greatest length, and a file that expands more than any text does is set aside.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from tilewright.core.units import format_bytes
from tilewright.data.sources.documents import Reject

LONGEST_LINE = 16 << 20
"""Bytes of the longest line of a compressed file."""
MAX_EXPANSION = 256
"""Text bytes per compressed byte beyond which a file is no text: prose has 3 to 10, logs and tables up to 100."""
FREE_EXPANSION = 4 << 20
"""Bytes that any file may expand to: short ones may well be one line repeated."""

_CHUNK = 1 << 20
_WINDOW = 1 << 27
"""Largest zstd window, as `zstd --ultra -22` has it. Memory is taken from it as the text comes, not before."""
_FEED = {".gz": 4096, ".zst": 128}
"""Compressed bytes decompressed at once. At most 1032 bytes come of one in gzip, in zstd 128 KiB of four: 4 MiB."""


def segment_lines(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line with its line end) of the lines that begin in [start, end) of a plain file."""
    with path.open("rb") as file:
        if start > 0:
            file.seek(start - 1)
            file.readline()  # the rest of a line that began earlier; only its line end where `start` begins one
        offset = file.tell()
        while offset < end:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


def compressed_lines(
    name: str, path: Path, longest: int = LONGEST_LINE, *, cut: bool = False
) -> Iterator[bytes | Reject]:
    """Lines of a .gz or .zst file. After damage, what came before it stays and one reject says what is lost.

    Args:
        name: of the file, for rejects.
        path: the file.
        longest: bytes of the longest line.
        cut: longer lines come in several pieces, cut between UTF-8 characters; False: each is set aside, as a reject.
    """
    held = bytearray()
    skipping = False
    for piece in decompressed(name, path):
        if isinstance(piece, Reject):
            yield piece  # what is held is a line cut in two, part of the loss
            return
        for number, part in enumerate(piece.split(b"\n")):
            if number:  # the line before it is whole
                if not skipping:
                    yield bytes(held) + b"\n"
                    held.clear()
                skipping = False
            if skipping:
                continue
            held += part
            while cut and len(held) >= longest:
                stop = longest - _open_character(held[longest - 4 : longest])
                yield bytes(held[:stop])
                del held[:stop]
            if len(held) >= longest:
                yield Reject(name, f"line longer than {format_bytes(longest)}")
                held.clear()
                skipping = True
    if held:
        yield bytes(held)


def _open_character(data: bytearray) -> int:
    """Bytes at the end of UTF-8 `data` that begin a character whose rest is not there; 0 where it ends whole."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character: its high bits count the bytes
            return back if back < (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0) + 1 else 0
    return 0


def decompressed(name: str, path: Path) -> Iterator[bytes | Reject]:
    """Decompressed pieces of a .gz or .zst file of one or several members, each of at most a few MiB.

    A last reject where the file is damaged, or expands more than `MAX_EXPANSION` times.
    """
    feed = _FEED[path.suffix]
    decoder = _new_decoder(path)
    fed, taken, given = False, 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            at = 0
            while at < len(chunk):
                part = chunk[at : at + feed]
                at += len(part)
                fed = True
                try:
                    piece = decoder.decompress(part)
                except (zlib.error, zstandard.ZstdError) as error:
                    yield Reject(name, "damaged compressed file, the rest is lost", example=str(error))
                    return
                if decoder.eof:
                    at -= len(decoder.unused_data)
                    decoder = _new_decoder(path)
                    fed = False
                given += len(piece)
                if given > FREE_EXPANSION + MAX_EXPANSION * (taken + at):
                    yield expands_too_much(name, given, taken + at)
                    return
                if piece:
                    yield piece
            taken += len(chunk)
    if fed:
        yield Reject(name, "truncated compressed file, the rest is lost")


def expands_too_much(name: str, num_bytes: int, compressed: int) -> Reject:
    """The reject of a file, or a part of one, that is no text because it expands as none does."""
    reason = f"expands to more than {MAX_EXPANSION} times its size, the rest is lost"
    return Reject(name, reason, example=f"{format_bytes(num_bytes)} from {format_bytes(compressed)}")


def _new_decoder(path: Path):
    if path.suffix == ".gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj()

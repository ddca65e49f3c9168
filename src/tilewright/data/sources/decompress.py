"""Bytes of plain and compressed files, in pieces of a few MiB whatever they hold.

A compressed file that expands more than any text does is refused. Damage is reported, not raised. Text that a
byte-order mark says to be UTF-16 or UTF-32 comes out as UTF-8.
"""

import bz2
import codecs
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import zstandard

from tilewright.core.units import format_bytes
from tilewright.data.common.records import Rejected, rejected
from tilewright.data.sources.source_parts import not_as_marked, wide_encoding

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
"""Suffixes of files that are read decompressed."""
MAX_EXPANSION = 256
"""Text bytes per compressed byte beyond which a file is no text: prose has 3 to 10, logs and tables up to 100."""
FREE_EXPANSION = 4 << 20
"""Bytes that any file may expand to: short ones may well be one line repeated."""

_CHUNK = 1 << 20
_WINDOW = 1 << 27
"""Largest zstd window, as `zstd --ultra -22` has it. Memory is taken from it as the text comes, not before."""
_XZ_MEMORY = 1 << 28
"""Most memory for xz, whose largest preset (`xz -9`) takes 65 MiB."""
_FEED = {".gz": 4096, ".zst": 128, ".xz": 4096, ".bz2": 4096}
"""Compressed bytes decompressed at once. At most 1032 bytes come of one in gzip, in zstd 128 KiB of four: 4 MiB. xz and
bz2 may expand further and give their text in several pieces."""
_PIECE = 1 << 22
_DAMAGE = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)  # OSError is how bz2 says it


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _Bounded:
    """A decoder of xz or bz2, whose output is asked for in pieces: `more` while there is some without new input."""

    def __init__(self, decoder: "lzma.LZMADecompressor | bz2.BZ2Decompressor"):
        self._decoder = decoder

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    @property
    def more(self) -> bool:
        return not self._decoder.eof and not self._decoder.needs_input

    def decompress(self, data: bytes, /) -> bytes:
        return self._decoder.decompress(data, _PIECE)


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(),
    ".xz": lambda: _Bounded(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)),
    ".bz2": lambda: _Bounded(bz2.BZ2Decompressor()),
}


def utf8_pieces(name: str, path: Path) -> Iterator[bytes | Rejected]:
    """Yield a plain or compressed file as pieces of UTF-8, converted if its first bytes name another encoding.

    Nothing is checked of a file without a byte-order mark. A last reject says what is lost, if anything is.
    """
    pieces = decompressed(name, path) if path.suffix in COMPRESSED else _plain(path)
    first = b""
    for piece in pieces:
        if isinstance(piece, Rejected):
            if first:
                yield first
            yield piece
            return
        first += piece
        if len(first) >= 4:  # the longest mark
            break
    encoding = wide_encoding(first)
    if encoding:
        yield from _transcoded(name, encoding, first, pieces)
        return
    first = first.removeprefix(codecs.BOM_UTF8)
    if first:
        yield first
    yield from pieces


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _transcoded(name: str, encoding: str, first: bytes, rest: Iterator[bytes | Rejected]) -> Iterator[bytes | Rejected]:
    decoder = codecs.getincrementaldecoder(encoding)()
    piece: bytes | Rejected = first
    while True:
        if isinstance(piece, Rejected):
            yield piece
            return
        try:
            text = decoder.decode(piece, not piece)
        except UnicodeDecodeError as error:
            yield not_as_marked(name, encoding, error.reason)
            return
        if text:
            yield text.encode("utf-8")
        if not piece:
            return
        piece = next(rest, b"")


def decompressed(
    name: str, path: Path, suffix: str = "", max_expansion: float = MAX_EXPANSION
) -> Iterator[bytes | Rejected]:
    """Decompressed pieces of a file of one or several members, each of at most a few MiB.

    A last reject where the file is damaged, or expands more than `max_expansion` times. `suffix` says how it is
    compressed; "": as that of the path says.
    """
    feed, new = _FEED[suffix or path.suffix], _DECODERS[suffix or path.suffix]
    decoder = new()
    fed, whole, taken, given = False, False, 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            at = 0
            while at < len(chunk) or (fed and getattr(decoder, "more", False)):
                part = chunk[at : at + feed] if not getattr(decoder, "more", False) else b""
                if whole and not fed and not part.strip(b"\0"):
                    at += len(part)  # padding after a member, as tape and xz have it
                    continue
                at += len(part)
                fed = True
                try:
                    piece = decoder.decompress(part)
                except _DAMAGE as error:
                    yield rejected(name, "damaged compressed file, the rest is lost", str(error))
                    return
                if decoder.eof:
                    at -= len(decoder.unused_data)
                    decoder = new()
                    fed, whole = False, True
                given += len(piece)
                if given > FREE_EXPANSION + max_expansion * (taken + at):
                    yield expands_too_much(name, given, taken + at, max_expansion)
                    return
                if piece:
                    yield piece
            taken += len(chunk)
    if fed:
        yield rejected(name, "truncated compressed file, the rest is lost")


def expands_too_much(name: str, num_bytes: int, compressed: int, max_expansion: float = MAX_EXPANSION) -> Rejected:
    """The reject when decompressed of a file, or a part of one, that is no text because it expands as none does."""
    reason = f"expands to more than {max_expansion:g} times its size, the rest is lost"
    return rejected(name, reason, f"{format_bytes(num_bytes)} from {format_bytes(compressed)}")

"""Lines of plain and compressed files, as bytes, with damage reported instead of raised.

A large plain file is read by segments: a line belongs to the segment that it begins in, so segments can be read in
any order, or left out, and every line is read once. Used by `files`.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from tilewright.data.documents import Reject

_CHUNK = 1 << 20


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


def compressed_lines(name: str, path: Path) -> Iterator[bytes | Reject]:
    """Lines of a .gz or .zst file. After damage, what came before it stays and one reject says what is lost."""
    rest = b""
    damage: Reject | None = None
    for piece in decompressed(name, path):
        if isinstance(piece, Reject):
            damage = piece
            break
        first, *lines = (rest + piece).split(b"\n")
        for line in lines:
            yield first + b"\n"
            first = line
        rest = first
    if damage:
        yield damage  # `rest` is a line cut in two, part of the loss
    elif rest:
        yield rest


def decompressed(name: str, path: Path) -> Iterator[bytes | Reject]:
    """Decompressed pieces of a .gz or .zst file of one or several members; a last reject where it is damaged."""
    gz = path.suffix == ".gz"
    decoder = _new_decoder(gz)
    fed = False
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            while chunk:
                fed = True
                try:
                    piece = decoder.decompress(chunk)
                except (zlib.error, zstandard.ZstdError) as error:
                    yield Reject(name, "damaged compressed file, the rest is lost", example=str(error))
                    return
                if piece:
                    yield piece
                chunk = b""
                if decoder.eof:
                    chunk = decoder.unused_data
                    decoder = _new_decoder(gz)
                    fed = False
    if fed:
        yield Reject(name, "truncated compressed file, the rest is lost")


def _new_decoder(gz: bool):
    return zlib.decompressobj(wbits=31) if gz else zstandard.ZstdDecompressor().decompressobj()

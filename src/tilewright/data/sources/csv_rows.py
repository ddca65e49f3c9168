"""Rows of text out of .csv and .tsv files, plain or compressed: the first row names the columns.

Read by Arrow in blocks: quotes, line ends in quotes and doubled quotes as RFC 4180 has them. A field has a greatest
length. Rows with more or fewer fields than the first are refused one by one.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc

from tilewright.data.sources.decompress import utf8_pieces
from tilewright.data.sources.documents import Document, Reject
from tilewright.data.sources.tables import first_line

_BLOCK = 16 << 20
"""Bytes of a block, and so of the longest row."""


class _Pieces(io.RawIOBase):
    """A file of pieces that come one after the other. `lost` is the reject that they ended with, if any."""

    def __init__(self, pieces: Iterator[bytes | Reject]):
        super().__init__()
        self.lost: Reject | None = None
        self.length = 0
        self._pieces, self._held = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer, /) -> int:
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            if isinstance(piece, Reject):
                self.lost = piece
                return 0
            self._held = piece
            self.length += len(piece)
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size


def read_csv(name: str, path: Path, delimiter: str, field: str) -> Iterator[Document | Reject]:
    """One document per row, out of the column `field`."""
    bad: list[Reject] = []

    def other_width(found) -> str:
        size = len(found.text or "")
        example = f"{found.actual_columns} instead of {found.expected_columns}"
        bad.append(Reject(name, "row with another number of fields", 1, example, size))
        return "skip"

    parse = pc.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=other_width)
    number = 0
    pieces = _Pieces(utf8_pieces(name, path))
    try:
        problem = _header_problem(name, path, parse, field)
        bad.clear()
        if problem:
            yield problem
            return
        column = field.encode("utf-8", "surrogateescape").decode("latin-1")
        only = pc.ConvertOptions(include_columns=[column], column_types={column: pa.string()})
        for block in _open(pieces, parse, only):
            for value in block.column(0).to_pylist():
                number += 1
                yield _row(name, number, value)
            yield from bad
            bad.clear()
    except (pa.ArrowException, ValueError) as error:
        if pieces.lost is None:
            yield Reject(name, "damaged CSV file, the rest is lost", example=first_line(error))
    yield from bad
    if pieces.lost is not None:
        yield pieces.lost


def _open(pieces: _Pieces, parse: pc.ParseOptions, convert: pc.ConvertOptions) -> pc.CSVStreamingReader:
    """A reader that takes bytes for Latin-1, which any are: Arrow drops rows of other bytes without a word."""
    read = pc.ReadOptions(use_threads=False, block_size=_BLOCK, encoding="latin-1")
    return pc.open_csv(pieces, read, parse, convert)


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _header_problem(name: str, path: Path, parse: pc.ParseOptions, field: str) -> Reject | None:
    """Why the file has no column `field`, or two, or None. Reads the first block."""
    names = _open(_Pieces(utf8_pieces(name, path)), parse, pc.ConvertOptions()).schema.names
    names = [_bytes(n).decode("utf-8", "replace") for n in names]
    if names.count(field) > 1:
        return Reject(name, f"several columns named {field!r}")
    if field in names:
        return None
    return Reject(name, f"no field {field!r}", example="fields: " + ", ".join(n[:40] for n in names[:8]))


def _row(name: str, number: int, value: str) -> Document | Reject:
    data = _bytes(value)
    try:
        return Document(f"{name}:{number}", data.decode("utf-8"))
    except UnicodeDecodeError as error:
        example = f"row {number}: byte 0x{data[error.start]:02x}"
        return Reject(name, "row is not UTF-8", example=example, num_bytes=len(data))

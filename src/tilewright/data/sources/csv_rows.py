"""Rows of text out of .csv and .tsv files, plain or compressed: the first row names the columns.

Read by Arrow in blocks: quotes, line ends in quotes and doubled quotes as RFC 4180 has them. A field has a greatest
length. Rows with more or fewer fields than the first are refused one by one.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from tilewright.data.common.records import Record, Rejected, rejected, text_of
from tilewright.data.sources.decompress import utf8_pieces
from tilewright.data.sources.file_lines import LONGEST_LINE
from tilewright.data.sources.json_rows import whole_row
from tilewright.data.sources.parquet_and_arrow import damage_in


class _Pieces(io.RawIOBase):
    """A file of pieces that come one after the other. `lost` is the reject that they ended with, if any."""

    def __init__(self, pieces: Iterator[bytes | Rejected]):
        super().__init__()
        self.lost: Rejected | None = None
        self.length = 0
        self._pieces, self._held = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._held:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            if isinstance(piece, Rejected):
                self.lost = piece
                return 0
            self._held = piece
            self.length += len(piece)
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size


def read_csv(
    name: str, path: Path, delimiter: str, field: str | None, longest: int = LONGEST_LINE
) -> Iterator[Record | Rejected]:
    """Read a .csv or .tsv file: one document per row, out of the column `field`; None: the whole row as a JSON object.

    `longest` is the size of the blocks that Arrow reads, and so of the longest row.
    """
    # Arrow drops such rows through this callback; they are given after the block that they were in.
    bad: list[Rejected] = []

    def other_width(found) -> str:
        size = len(found.text or "")
        example = f"{found.actual_columns} instead of {found.expected_columns}"
        bad.append(rejected(name, "row with another number of fields", example, num_bytes=size))
        return "skip"

    parse = pc.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=other_width)
    number = 0
    pieces = _Pieces(utf8_pieces(name, path))
    try:
        # The look at the header meets such rows too, and they come again.
        problem = _header_problem(name, path, parse, field, longest)
        bad.clear()
        if problem:
            yield problem
            return
        for block in _open(pieces, parse, _wanted(name, path, parse, field, longest), longest):
            for values in block.to_pylist():
                number += 1
                yield _row(name, number, values, field)
            yield from bad
            bad.clear()
    except (pa.ArrowException, ValueError) as error:
        # Where bytes were no text the table ended there: that reason is given instead, at the end.
        if pieces.lost is None:
            yield rejected(name, "damaged CSV file, the rest is lost", damage_in(error))
    yield from bad
    if pieces.lost is not None:
        yield pieces.lost


def _open(pieces: _Pieces, parse: pc.ParseOptions, convert: pc.ConvertOptions, longest: int) -> pc.CSVStreamingReader:
    """Open a .csv by a reader that takes bytes for Latin-1, which any are: Arrow drops rows of other bytes and reports
    nothing."""
    read = pc.ReadOptions(use_threads=False, block_size=longest, encoding="latin-1")
    return pc.open_csv(pieces, read, parse, convert)


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _names(name: str, path: Path, parse: pc.ParseOptions, longest: int) -> list[str]:
    """Names of a .csv's columns, as Latin-1 has their bytes. Reads the first block."""
    return _open(_Pieces(utf8_pieces(name, path)), parse, pc.ConvertOptions(), longest).schema.names


def _wanted(name: str, path: Path, parse: pc.ParseOptions, field: str | None, longest: int) -> pc.ConvertOptions:
    if field is None:
        columns = _names(name, path, parse, longest)
    else:
        columns = [field.encode("utf-8", "surrogateescape").decode("latin-1")]
    return pc.ConvertOptions(include_columns=columns, column_types=dict.fromkeys(columns, pa.string()))


def _header_problem(name: str, path: Path, parse: pc.ParseOptions, field: str | None, longest: int) -> Rejected | None:
    """The problem of a .csv's header: why the file has no column `field`, or two, or None."""
    names = [_bytes(n).decode("utf-8", "replace") for n in _names(name, path, parse, longest)]
    if field is None:
        twice = next((n for n in names if names.count(n) > 1), None)
        return None if twice is None else rejected(name, f"several columns named {twice[:40]!r}")
    if names.count(field) > 1:
        return rejected(name, f"several columns named {field!r}")
    if field in names:
        return None
    return rejected(name, f"no field {field!r}", "fields: " + ", ".join(n[:40] for n in names[:8]))


def _row(name: str, number: int, values: dict[str, str], field: str | None) -> Record | Rejected:
    data = _bytes(whole_row(values) if field is None else next(iter(values.values())))
    try:
        return text_of(name, data.decode("utf-8"), f"row {number}")
    except UnicodeDecodeError as error:
        example = f"row {number}: byte 0x{data[error.start]:02x}"
        return rejected(name, "row is not UTF-8", example, num_bytes=len(data))

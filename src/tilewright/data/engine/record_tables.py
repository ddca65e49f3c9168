"""Records and rejects as Parquet: schemas, a writer whose row groups are bounded in bytes, and batched readers.

The same rows give the same bytes. Row groups hold about 4 MiB of text, so that no reader needs more at once.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.data.common.records import Record, Rejected

_GROUP_BYTES, _GROUP_ROWS = 4 << 20, 16_384
_EXCERPT = 200

RECORDS = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("id", "modality", "domain", "text", "language", "path", "part")),
        *(pa.field(name, pa.int64()) for name in ("start", "stop")),
        *(pa.field(name, pa.string()) for name in ("facts", "scores")),  # JSON objects
        pa.field("chunk", pa.int32()),
    ]
)
_FIELDS, _OBJECTS, _EMPTY = tuple(RECORDS.names), ("facts", "scores"), "{}"
_VALUES = attrgetter(*_FIELDS)
REJECTS = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("id", "domain", "path", "part", "stage", "rule", "value")),
        *(pa.field(name, pa.string()) for name in ("threshold", "excerpt")),
        *(pa.field(name, pa.int64()) for name in ("count", "num_bytes")),
    ]
)
_REJECT_VALUES = attrgetter(*REJECTS.names)


class TableWriter:
    """Appends rows to a Parquet file. A context manager.

    Args:
        path: the file.
        schema: its columns.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self.num_rows = 0
        self._schema = schema
        self._names, self._texts = schema.names, [one.name for one in schema if pa.types.is_string(one.type)]
        self._rows: list[tuple[Any, ...]] = []
        self._held = 0
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=1)

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row to a table of records; columns that it lacks are null."""
        self._rows.append(tuple(map(row.get, self._names)))
        self._held += sum(map(len, filter(None, map(row.get, self._texts))))
        self.num_rows += 1
        if self._held >= _GROUP_BYTES or len(self._rows) >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = dict(zip(self._names, map(list, zip(*self._rows, strict=True)), strict=True))
            self._writer.write_table(pa.table(columns, schema=self._schema), row_group_size=1 << 30)
        self._rows, self._held = [], 0

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is None:
            self._flush()
        self._writer.close()


def record_row(record: Record) -> dict[str, Any]:
    """A record as a row of the table `RECORDS`; its arrays stay behind."""
    row = dict(zip(_FIELDS, _VALUES(record), strict=True))
    for name in _OBJECTS:
        row[name] = json.dumps(dict(row[name]), sort_keys=True) if row[name] else _EMPTY
    return row


def record_of(row: Mapping[str, Any]) -> Record:
    """The record of a row of the table `RECORDS`, without arrays.

    Example:
        >>> record = Record("", "image", "ants", "an ant", facts={"width": 3})
        >>> record_of(record_row(record)) == record
        True
    """
    values = {name: row[name] for name in _FIELDS}
    for name in _OBJECTS:
        values[name] = json.loads(values[name]) if values[name] != _EMPTY else {}
    return Record(**values)


def reject_row(reject: Rejected) -> dict[str, Any]:
    """A reject as a row of the table `REJECTS`. Numbers become text, excerpts are cut, and what is no UTF-8 is
    escaped."""
    row = dict(zip(REJECTS.names, _REJECT_VALUES(reject), strict=True))
    row["excerpt"] = row["excerpt"][:_EXCERPT]
    for name in ("value", "threshold"):
        row[name] = f"{row[name]:.6g}" if isinstance(row[name], float) else str(row[name])
    for name, value in row.items():
        if isinstance(value, str) and not value.isascii():
            row[name] = value.encode("utf-8", "backslashreplace").decode("utf-8")
    return row


def batches(path: Path, columns: Iterable[str] | None = None) -> Iterator[tuple[int, dict[str, list[Any]]]]:
    """Batches of a table of records: (number of its first row, columns as lists) of each row group."""
    first = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=None if columns is None else list(columns), use_threads=False)
            yield first, table.to_pydict()
            first += table.num_rows


def rows(path: Path, columns: Iterable[str] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a table of records one by one, as dicts."""
    for _, batch in batches(path, columns):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(names, values, strict=True))


def num_rows(path: Path) -> int:
    """Rows of a table of records, a Parquet file, from its footer."""
    return pq.read_metadata(path).num_rows

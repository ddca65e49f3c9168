"""Rows of text out of .parquet files and Hugging Face datasets saved to disk (Arrow files), by pyarrow alone. Parquet
is split into parts by row group, Arrow by ranges of rows: both can be picked without reading."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.core.errors import check_damage
from tilewright.data.common.records import Record, Rejected, rejected, text_of
from tilewright.data.sources.decompress import FREE_EXPANSION, MAX_EXPANSION, expands_too_much
from tilewright.data.sources.file_lines import LONGEST_LINE, too_long
from tilewright.data.sources.json_rows import whole_row
from tilewright.data.sources.source_parts import Part, printable

_ARROW_ROWS = 4096  # rows in one part of an Arrow file
_BATCH_ROWS = 16  # a batch is in memory whole, also where all of its rows are one long value of a dictionary
_DAMAGE = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises on damaged files; ArrowInvalid is a ValueError


def parquet_parts(
    domain: str,
    name: str,
    path: Path,
    field: str | None,
    max_expansion: float = MAX_EXPANSION,
    longest: int = LONGEST_LINE,
) -> list[Part | Rejected]:
    """Parts of a .parquet file, one a row group, or a reject where it is damaged or has no such text column."""
    try:
        with pq.ParquetFile(path) as file:
            problem = _field_problem(file.schema_arrow, field)
            if problem:
                return [rejected(name, *problem, count=file.metadata.num_rows)]
            sizes = [_column_bytes(file.metadata.row_group(i), field) for i in range(file.num_row_groups)]
            rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except _DAMAGE as error:
        return [rejected(name, "damaged parquet file", damage_in(error))]
    parts: list[Part | Rejected] = []
    for group, (size, compressed) in enumerate(sizes):
        if size > FREE_EXPANSION + max_expansion * compressed:
            parts.append(replace(expands_too_much(name, size, compressed, max_expansion), count=rows[group]))
        else:
            read = partial(_read_row_group, name, path, group, field, longest)
            parts.append(Part(domain, f"{name}@{group}", size, read, name))
    return parts or [rejected(name, "no rows")]


def _column_bytes(row_group: pq.RowGroupMetaData, field: str | None) -> tuple[int, int]:
    """Bytes of a Parquet file's text column, its pages, decompressed and as they are in the file."""
    every = (row_group.column(i) for i in range(row_group.num_columns))
    columns = [column for column in every if field is None or column.path_in_schema == field]
    return sum(c.total_uncompressed_size for c in columns), sum(c.total_compressed_size for c in columns)


def _read_row_group(name: str, path: Path, group: int, field: str | None, longest: int) -> Iterator[Record | Rejected]:
    row = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = None if field is None else [field]
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
                yield from _records(name, f" of group {group}", row, _column(batch, field), longest)
                row += batch.num_rows
    except _DAMAGE as error:
        yield rejected(name, "damaged parquet file, the rest of the row group is lost", damage_in(error))


def is_saved_dataset(folder: Path) -> bool:
    """True if `folder` holds Arrow files: it was written by `save_to_disk` of Hugging Face datasets."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_dataset_parts(folder: Path, field: str | None, domains: tuple[str, ...]) -> list[Part | Rejected]:
    """Parts of a saved dataset of Arrow files. Of several splits only `train` is read, unless `domains` names
    others."""
    if not (folder / "dataset_dict.json").is_file():
        return _split_parts("text", folder, "", field)
    splits = sorted(f.name for f in folder.iterdir() if f.is_dir() and is_saved_dataset(f))
    wanted = domains or (("train",) if "train" in splits else tuple(splits))
    found: list[Part | Rejected] = []
    for split in splits:
        if split in wanted:
            found += _split_parts(split, folder / split, f"{split}/", field)
        else:
            found.append(rejected(split, "split not trained on", "name it in data.domains"))
    return found


def _split_parts(domain: str, folder: Path, prefix: str, field: str | None) -> list[Part | Rejected]:
    try:
        state = json.loads((folder / "state.json").read_bytes())
        files = [str(entry["filename"]) for entry in state["_data_files"]]
    except FileNotFoundError:
        return [rejected(f"{prefix}state.json", "damaged dataset", "no such file")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return [rejected(f"{prefix}state.json", "damaged dataset", damage_in(error))]
    parts: list[Part | Rejected] = []
    for file in files:
        name = f"{prefix}{printable(file)}"
        if (folder / file).is_file():
            parts += arrow_parts(domain, name, folder / file, field)
        else:
            parts.append(rejected(name, "damaged dataset", "no such file"))
    return parts


def arrow_parts(
    domain: str, name: str, path: Path, field: str | None, longest: int = LONGEST_LINE
) -> list[Part | Rejected]:
    """Parts of an Arrow file, one for each few thousand rows, or a reject."""
    try:
        table = _open_arrow(path)
        problem = _field_problem(table.schema, field)
        if problem:
            return [rejected(name, *problem, count=table.num_rows)]
        size = table.nbytes if field is None else table.column(field).nbytes
    except _DAMAGE as error:
        return [rejected(name, "damaged Arrow file", damage_in(error))]
    starts = range(0, table.num_rows, _ARROW_ROWS)
    share = size // max(1, len(starts))
    found: list[Part | Rejected] = [
        Part(domain, f"{name}@{i}", share, partial(_read_arrow, name, path, i, field, longest), name) for i in starts
    ]
    return found or [rejected(name, "no rows")]


def _open_arrow(path: Path) -> pa.Table:
    """The table of an Arrow stream or file, memory-mapped: nothing is read but its schema and offsets."""
    source = pa.memory_map(str(path))
    if source.read(6) == b"ARROW1":
        return pa.ipc.open_file(source).read_all()
    source.seek(0)
    return pa.ipc.open_stream(source).read_all()


def _read_arrow(name: str, path: Path, start: int, field: str | None, longest: int) -> Iterator[Record | Rejected]:
    try:
        rows = _open_arrow(path).slice(start, _ARROW_ROWS)
        if field is not None:
            rows = rows.select([field])
        rows.validate(full=True)  # offsets of a damaged file may lie outside of it
        yield from _records(name, "", start, _column(rows, field), longest)
    except _DAMAGE as error:
        yield rejected(name, "damaged Arrow file", damage_in(error))


def _column(rows: pa.RecordBatch | pa.Table, field: str | None) -> Iterator[object]:
    """The values of a text column of a Parquet or Arrow file, or the rows themselves."""
    if field is not None:
        return iter(rows.column(field).to_pylist())
    return iter(rows.to_pylist())


def _records(
    file: str, group: str, first_row: int, values: Iterator[object], longest: int
) -> Iterator[Record | Rejected]:
    for row, value in enumerate(values, first_row):
        text = whole_row(value) if isinstance(value, dict) else value
        if isinstance(text, str):
            size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
            yield text_of(file, text, f"row {row}{group}") if size <= longest else too_long(file, longest, size)
        else:
            yield rejected(file, "row without text", f"row {row}: {str(value)[:40]!r}")


def _field_problem(schema: pa.Schema, field: str | None) -> tuple[str, str] | None:
    if field is None:
        return None if len(set(schema.names)) == len(schema.names) else ("several columns of one name", "")
    if field not in schema.names:
        return f"no field {field!r}", "fields: " + ", ".join(schema.names)
    kind = schema.field(field).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        return f"field {field!r} is not text", f"its type: {kind}"
    return None


def damage_in(error: Exception) -> str:
    """The message of an Arrow error on a file, in one line.

    Raises:
        OSError, MemoryError: it speaks of this machine, or of a file that cannot be read.
    """
    check_damage(error)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

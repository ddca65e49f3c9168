"""The user's own data: a folder, one file, or a Hugging Face dataset on disk, as parts that can be sampled.

Text files (the suffixes below), .jsonl, both also .gz or .zst, .parquet and .arrow. The first sub-folder names the
domain; files at the top are domain `text`. Large plain files become several parts, so that a byte limit samples the
whole file and not its beginning. Compressed files cannot be entered in the middle and are read from the start.
"""

import json
import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import xxhash

from tilewright.core.errors import DataError
from tilewright.data.sources.documents import UTF16_MARKS, Document, Part, Reject, Source, decode
from tilewright.data.sources.lines import compressed_lines, segment_lines
from tilewright.data.sources.tables import arrow_parts, is_saved_dataset, parquet_parts, saved_dataset_parts

SEGMENT_BYTES = 1 << 20
"""Plain files above this are split into parts of this size."""

_TEXT_SUFFIXES = """
    .txt .md .rst .tex .org .html .htm .xml .py .pyi .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .java .kt .scala .go .rs .js
    .jsx .ts .tsx .css .rb .php .pl .lua .sh .bash .zsh .ps1 .sql .r .jl .m .swift .hs .ml .clj .ex .erl .lisp .el .vim
    .zig .nim .f90 .toml .yaml .yml .ini .cfg .cmake .proto .srt
"""
_COMPRESSED = (".gz", ".zst")
_EXPANSION = 4  # text bytes a compressed byte, for size estimates only


def user_source(source: str, text_field: str = "text", domains: tuple[str, ...] = ()) -> Source:
    """The source over a path of the user's.

    Raises:
        DataError: the path does not exist. (One that holds nothing usable is found out when it is read.)
    """
    root = Path(source).expanduser()
    if not root.exists():
        raise DataError(
            "No training data at this path",
            where="data.source",
            got=f"{source!r}, which does not exist",
            need="a folder, a file, or 'installed'",
            try_='data.source = "installed"   (the text that this installation carries)',
        )
    digest = xxhash.xxh3_128(f"{root.resolve()}\0{text_field}\0{','.join(domains)}".encode())
    found: list[Part | Reject] = []
    saved = root.is_dir() and is_saved_dataset(root)
    for path in _walk(root, found):
        try:
            status = path.stat()
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
            if not saved:
                found += _parts_of(root, path, status, text_field)
        except OSError as error:
            found.append(Reject(path.name, "cannot be read", example=str(error.strerror)))
    if saved:
        found += saved_dataset_parts(root, text_field, domains)
    parts = tuple(item for item in found if isinstance(item, Part))
    return Source(str(root), digest.hexdigest(), parts, tuple(item for item in found if isinstance(item, Reject)))


def _walk(root: Path, found: list[Part | Reject]) -> Iterator[Path]:
    """Files below `root` in a fixed order; hidden ones and folders that cannot be entered become rejects."""
    if root.is_file():
        yield root
        return

    def closed(error: OSError) -> None:
        found.append(Reject(str(error.filename), "cannot be read", example=str(error.strerror)))

    for folder, folders, files in os.walk(root, onerror=closed):
        here = Path(folder)
        for name in sorted(folders + files):
            if name.startswith("."):
                found.append(Reject((here / name).relative_to(root).as_posix(), "hidden file or folder"))
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield from (here / f for f in sorted(files) if not f.startswith("."))


def _parts_of(root: Path, path: Path, status: os.stat_result, field: str) -> list[Part | Reject]:
    single = path == root
    name = path.name if single else path.relative_to(root).as_posix()
    domain = name.split("/")[0] if "/" in name else "text"
    compressed = path.suffix in _COMPRESSED
    kind = Path(path.stem).suffix.lower() if compressed else path.suffix.lower()
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        return [Reject(name, "not a regular file")]
    if size == 0:
        return [Reject(name, "empty file")]
    if kind == ".parquet" and not compressed:
        return parquet_parts(domain, name, path, field)
    if kind == ".arrow" and not compressed:
        return arrow_parts(domain, name, path, field)
    if kind == ".jsonl" and compressed:
        return [Part(domain, name, size * _EXPANSION, partial(_read_compressed_jsonl, name, path, field))]
    if kind == ".jsonl":
        return _segments(domain, name, size, partial(_read_jsonl, name, path, field))
    if kind not in _TEXT_SUFFIXES.split() and not single:
        return [Reject(name, f"file type {kind or 'without a suffix'} is not read")]
    if compressed:
        return [Part(domain, name, size * _EXPANSION, partial(_read_compressed_text, name, path))]
    if size > SEGMENT_BYTES and not _is_utf16(path):
        return _segments(domain, name, size, partial(_read_text_segment, name, path))
    return [Part(domain, name, size, partial(_read_text, name, path))]


def _is_utf16(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2).startswith(UTF16_MARKS)


def _segments(domain: str, name: str, size: int, read) -> list[Part | Reject]:
    starts = range(0, size, SEGMENT_BYTES)
    return [
        Part(domain, f"{name}@{start}", min(SEGMENT_BYTES, size - start), partial(read, start, start + SEGMENT_BYTES))
        for start in starts
    ]


def _read_text(name: str, path: Path) -> Iterator[Document | Reject]:
    yield from decode(name, path.read_bytes())


def _read_text_segment(name: str, path: Path, start: int, end: int) -> Iterator[Document | Reject]:
    yield from decode(f"{name}@{start}", b"".join(line for _, line in segment_lines(path, start, end)))


def _read_compressed_text(name: str, path: Path) -> Iterator[Document | Reject]:
    """The text in documents of about a segment, cut at line ends if there are any: never in memory whole."""
    block, held, number = [], 0, 0
    for line in compressed_lines(name, path, SEGMENT_BYTES, cut=True):
        if isinstance(line, Reject):
            yield line
            continue
        block.append(line)
        held += len(line)
        if held >= SEGMENT_BYTES:
            yield from decode(f"{name}@{number}", b"".join(block))
            block, held, number = [], 0, number + 1
    if block:
        yield from decode(f"{name}@{number}", b"".join(block))


def _read_jsonl(name: str, path: Path, field: str, start: int, end: int) -> Iterator[Document | Reject]:
    for offset, line in segment_lines(path, start, end):
        yield from _row(name, f"byte {offset}", line, field)


def _read_compressed_jsonl(name: str, path: Path, field: str) -> Iterator[Document | Reject]:
    for number, line in enumerate(compressed_lines(name, path), 1):
        if isinstance(line, Reject):
            yield line
        else:
            yield from _row(name, f"line {number}", line, field)


def _row(name: str, at: str, line: bytes, field: str) -> Iterator[Document | Reject]:
    """The text of one JSON row, or why there is none."""
    if not line.strip():
        return
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield Reject(name, "line is not UTF-8", example=f"{at}: byte 0x{line[error.start]:02x}")
        return
    except ValueError as error:
        half = not line.endswith(b"\n")
        yield Reject(name, "half-written last line" if half else "line is not JSON", example=f"{at}: {error}")
        return
    if not isinstance(row, dict):
        yield Reject(name, "row is not an object", example=f"{at}: {type(row).__name__}")
    elif field not in row:
        yield Reject(name, f"no field {field!r}", example=f"{at}: fields {', '.join(map(str, list(row)[:8]))}")
    elif not isinstance(row[field], str):
        yield Reject(name, f"field {field!r} is not text", example=f"{at}: {type(row[field]).__name__}")
    else:
        yield Document(f"{name}:{at.split()[1]}", row[field])

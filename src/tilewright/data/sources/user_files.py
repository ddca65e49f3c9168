"""The user's own data: a folder, one file, or a Hugging Face dataset on disk, as parts that can be sampled.

Text files (the suffixes below, and those without one that are text), .jsonl, .json, .csv and .tsv, all of these also
compressed, .parquet and .arrow. The first sub-folder names the domain; files at the top are domain `text`. Large plain
files become several parts, so that a byte limit samples the whole file and not its beginning. Compressed files, .json
and tables of text cannot be entered in the middle and are read from the start.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import xxhash

from tilewright.core.errors import is_of_machine, machine_error
from tilewright.data.common.records import EMPTY, Record, Rejected, rejected
from tilewright.data.sources.csv_rows import read_csv
from tilewright.data.sources.decompress import COMPRESSED
from tilewright.data.sources.file_lines import LONGEST_LINE, segment_lines, streamed_lines, too_long
from tilewright.data.sources.find_files import Found, find_files, stat_key
from tilewright.data.sources.hub import PREFIX, hub_dataset
from tilewright.data.sources.json_rows import holds_lines, read_json, row, streamed_rows
from tilewright.data.sources.parquet_and_arrow import arrow_parts, is_saved_dataset, parquet_parts, saved_dataset_parts
from tilewright.data.sources.path_purpose import TEXT_SUFFIXES, Wanted, existing, wanted
from tilewright.data.sources.source_parts import (
    Part,
    Source,
    decode,
    decode_unmarked,
    looks_binary,
    printable,
    wide_encoding,
)

SEGMENT_BYTES = 1 << 20
"""Plain files above this are split into parts of this size."""

_EXPANSION = 4  # text bytes per compressed byte, for size estimates only
_SHORT_SUFFIX = re.compile(r"\.[a-z0-9_+-]{1,10}\Z")

_Read = Callable[[], Iterator[Record | Rejected]]


def user_source(
    source: str, text_field: str | None = "text", domains: tuple[str, ...] = (), want: Wanted | None = None
) -> Source:
    """The source over a path of the user's files.

    Args:
        source: a folder or file, or a dataset of the hub, `hf://org/name`.
        text_field: of rows that hold the text; None: whole rows are wanted, as JSON, and files of text are refused.
        domains: splits of a saved dataset to read.
        want: what it is read for; None: text, or conversations where whole rows are wanted.

    Raises:
        DataError: the path does not exist. (One that holds nothing usable is found out when it is read.)
    """
    want = want or wanted("chat" if text_field is None else "text")
    source = hub_dataset(source) if source.startswith(PREFIX) else source
    root = Path(source).expanduser()
    found = find_files(existing(root, source, want))
    digest = xxhash.xxh3_128(os.fsencode(f"{root.resolve()}\0{text_field}\0{','.join(domains)}"))
    saved = root.is_dir() and is_saved_dataset(root)
    items: list[Part | Rejected] = list(found.rejects)
    for name, path, status in found.files:
        digest.update(os.fsencode(f"{path}\0{stat_key(status)}\n"))
        if not saved:
            try:
                found_parts = parts_of_file(root, name, path, status, text_field)
                items += [_watched(item, path, status) for item in found_parts]
            except OSError as error:
                if is_of_machine(error):
                    raise machine_error(error, str(path)) from error
                items.append(rejected(name, "cannot be read", str(error.strerror), num_bytes=status.st_size))
    if saved:
        try:
            items += _dataset_items(root, found, text_field, domains)
        except OSError as error:
            raise machine_error(error, str(root)) from error
    parts = tuple(item for item in items if isinstance(item, Part))
    rejects = tuple(item for item in items if isinstance(item, Rejected))
    return Source(printable(str(root)), digest.hexdigest(), parts, rejects, found.sizes, want)


def several_sources(
    sources: Mapping[str, str], text_field: str | None, domains: tuple[str, ...] = (), want: Wanted | None = None
) -> Source:
    """One source over several paths of user files, each a domain of the name that it is given.

    Raises:
        DataError: a path does not exist.
    """
    want = want or wanted("chat" if text_field is None else "text")
    parts, rejects, sizes, keys = [], [], {}, []
    for name, path in sources.items():
        if domains and name not in domains:
            continue
        one = user_source(path, text_field, want=want.named(f"data.sources.{name}", want.one_of_several))
        keys.append(f"{name}\0{one.key}")
        parts += [
            replace(part, domain=name, name=f"{name}/{part.name}", file=f"{name}/{part.file or part.name}")
            for part in one.parts
        ]
        rejects += [replace(reject, path=f"{name}/{reject.path}") for reject in one.rejects]
        sizes |= {f"{name}/{file}": size for file, size in one.files.items()}
    digest = xxhash.xxh3_128(os.fsencode("\1".join(keys)))
    label = ", ".join(printable(path) for path in sources.values())
    return Source(label, digest.hexdigest(), tuple(parts), tuple(rejects), sizes, want)


def _dataset_items(root: Path, found: Found, field: str | None, domains: tuple[str, ...]) -> list[Part | Rejected]:
    """The items of a user's saved dataset; its files without rows are refused one by one."""
    items = saved_dataset_parts(root, field, domains)
    named = {item.file if isinstance(item, Part) else item.path for item in items}
    for name, path, status in found.files:
        if name not in named and name.split("/")[0] not in named:
            reason = "file of a saved dataset that holds no rows to read"
            items.append(rejected(name, reason, path.suffix, num_bytes=status.st_size))
    return items


def _watched(item: Part | Rejected, path: Path, status: os.stat_result) -> Part | Rejected:
    """A part of the user's files, watched: `item` with a reject at its end if the file has changed since `status`."""
    if isinstance(item, Rejected):
        return item

    def read() -> Iterator[Record | Rejected]:
        yield from item.read()
        now = path.stat()
        if stat_key(now) != stat_key(status):
            example = f"{now.st_size} bytes now, {status.st_size} when it was found"
            yield rejected(item.file, "file changed while it was read", example)

    return Part(item.domain, item.name, item.size, read, item.file)


def parts_of_file(
    root: Path, name: str, path: Path, status: os.stat_result, field: str | None
) -> list[Part | Rejected]:
    """The parts that one of the user's files below `root` gives, or why it gives none.

    Raises:
        OSError: it cannot be opened.
    """
    domain = name.split("/")[0] if "/" in name else "text" if field is not None else "chat"
    compressed = path.suffix in COMPRESSED
    kind = Path(path.stem).suffix.lower() if compressed else path.suffix.lower()
    size = status.st_size
    # 1. Refused by a look at the file.
    if not stat.S_ISREG(status.st_mode):
        return [rejected(name, "not a regular file")]
    if size == 0:
        return [rejected(name, EMPTY)]
    # 2. Tables that can be entered by groups of rows.
    if kind == ".parquet" and not compressed:
        return parquet_parts(domain, name, path, field)
    if kind == ".arrow" and not compressed:
        return arrow_parts(domain, name, path, field)
    # 3. Rows and text: parts of lines where the file can be entered anywhere, else one part from its start.
    streamed = compressed or _is_wide(path)
    if kind == ".jsonl" or (kind == ".json" and not streamed and holds_lines(path)):
        if not streamed:
            return _segments(domain, name, size, partial(_read_jsonl, name, path, field))
        read: _Read = partial(streamed_rows, name, path, field)
    elif kind == ".json":
        read = partial(read_json, name, path, field)
    elif kind in (".csv", ".tsv"):
        read = partial(read_csv, name, path, "," if kind == ".csv" else "\t", field)
    elif field is None or (path != root and kind not in TEXT_SUFFIXES.split() and (kind or not _is_text(path))):
        return [rejected(name, f"file type {_suffix(kind)} is not read", num_bytes=size)]
    elif size <= SEGMENT_BYTES and not compressed:
        read = partial(_read_text, name, path)
    elif streamed or not _has_lines(path):
        read = partial(_read_streamed_text, name, path)
    else:
        return _segments(domain, name, size, partial(_read_text_segment, name, path))
    # Of compressed files the size of the text is a guess, for sampling.
    return [Part(domain, name, size * (_EXPANSION if compressed else 1), read, name)]


def _suffix(kind: str) -> str:
    if not kind:
        return "without a suffix"
    return kind if _SHORT_SUFFIX.match(kind) else "of an odd name"


def _is_wide(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(wide_encoding(file.read(4)))


def _is_text(path: Path) -> bool:
    """True if a user's file without a suffix begins as text in UTF-8, UTF-16 or UTF-32."""
    with path.open("rb") as file:
        head = file.read(1 << 13)
    if wide_encoding(head):
        return True
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:
            return False
    return not looks_binary(head)


def _has_lines(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\n" in file.read(1 << 16)


def _segments(domain: str, name: str, size: int, read) -> list[Part | Rejected]:
    starts = range(0, size, SEGMENT_BYTES)
    return [
        Part(
            domain,
            f"{name}@{start}",
            min(SEGMENT_BYTES, size - start),
            partial(read, start, start + SEGMENT_BYTES),
            name,
        )
        for start in starts
    ]


def _read_text(name: str, path: Path) -> Iterator[Record | Rejected]:
    with path.open("rb") as file:
        yield from decode(name, file.read(2 * SEGMENT_BYTES))  # a file that grows meanwhile is read no further


def _read_text_segment(name: str, path: Path, start: int, end: int) -> Iterator[Record | Rejected]:
    lines = []
    for _, line in segment_lines(path, start, end, LONGEST_LINE):
        if len(line) > LONGEST_LINE:
            yield too_long(name, LONGEST_LINE, len(line))
        else:
            lines.append(line)
    of_segment = decode_unmarked if start else decode
    yield from of_segment(name, b"".join(lines), f"from byte {start}")


def _read_streamed_text(name: str, path: Path) -> Iterator[Record | Rejected]:
    """The text of a user's file in documents of about a segment, cut at line ends if there are any: never in memory
    whole."""
    block, held, number = [], 0, 0
    for line in streamed_lines(name, path, SEGMENT_BYTES, cut=True):
        if isinstance(line, Rejected):
            yield line
            continue
        block.append(line)
        held += len(line)
        if held >= SEGMENT_BYTES:
            yield from decode_unmarked(name, b"".join(block), f"block {number}")
            block, held, number = [], 0, number + 1
    if block:
        yield from decode_unmarked(name, b"".join(block), f"block {number}")


def _read_jsonl(name: str, path: Path, field: str | None, start: int, end: int) -> Iterator[Record | Rejected]:
    for offset, line in segment_lines(path, start, end, LONGEST_LINE):
        if len(line) > LONGEST_LINE:
            yield too_long(name, LONGEST_LINE, len(line))
        else:
            yield from row(name, f"byte {offset}", line, field)

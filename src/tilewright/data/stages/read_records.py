"""First stage: the records of a shard's files, with where each stands, and what could not be read.

Text that is longer than `max_chars` becomes several records; a record knows its bytes of the file where the file is
UTF-8 text or rows of JSON. Nothing is repaired here, so that places are those of the file.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import xxhash

from tilewright.core.errors import DataError, is_of_machine
from tilewright.data.common.records import HALF_PAIR, Record, Rejected
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import Item
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import AddedSetting, StageInput, per_shard
from tilewright.data.engine.record_tables import RECORDS, REJECTS, TableWriter, record_row, reject_row
from tilewright.data.readers.file_entry import Span
from tilewright.data.readers.limits import ReadLimits, ReadOptions
from tilewright.data.readers.read_file import UNREADABLE, read_file
from tilewright.data.sources.find_files import stat_key
from tilewright.data.sources.source_parts import cut
from tilewright.data.stages.chat.chat_settings import TEXT
from tilewright.data.stages.chat.conversation_records import ConversationReader
from tilewright.data.stages.media_tensors import ArrayWriter

STAGE = "read"

Items = Iterator[Record | Rejected]


@dataclass(frozen=True)
class FilesToRead:
    """The files of a shard, or ranges of them, and those that are refused unread: their readers were killed."""

    items: Sequence[Item]
    killed: Sequence[Item] = ()


class ShardFiles(StageInput):
    """The files of the shard of a unit."""

    def identity(self, c: Context, i: int) -> object:
        return c.listing.keys(i)

    def value(self, c: Context, i: int) -> FilesToRead:
        items = c.listing.shards[i]
        bad = [item for item in items if c.is_set_aside(item)]
        return FilesToRead([item for item in items if item not in bad], bad)

    def files(self, c: Context, i: int) -> list[Item]:
        return c.listing.shards[i]


def read_shard(
    index: int, settings: SimpleNamespace, folder: Path, *, files: FilesToRead, format: str
) -> Mapping[str, Any]:
    """Read a shard: write the records and rejects of its files into `folder`; returns counts.

    Args:
        index: of the shard.
        settings: of read, limits and media.
        folder: gets `records.parquet` and `rejects.parquet`, and pixels and frames of sound where they are wanted.
        files: the files.
        format: of what is in them: `chat.format`.
    """
    conversations = None if format == TEXT else ConversationReader(format)
    settings = settings if conversations is None else _of_whole_rows(settings)
    num_bytes = images = 0
    with (
        TableWriter(folder / "records.parquet", RECORDS) as records,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
        ArrayWriter(folder, settings.media) as arrays,
    ):
        for item in files.items:
            for found in read_item(item, settings):
                pieces = _cut(found, settings.read.max_chars) if isinstance(found, Record) else [found]
                for number, one in enumerate(pieces):
                    if isinstance(one, Record) and conversations is not None:
                        one = conversations.converted(one)
                    if isinstance(one, Record):
                        records.append(record_row(one))
                        num_bytes += len(one.text.encode())
                        images += one.modality == "image"
                        if not number:  # of a caption that is cut, the first piece has the picture
                            arrays.append(one)
                    else:
                        rejects.append(reject_row(one))
        for item in files.killed:
            rule = "process that read it was killed, twice"
            one = Rejected(item.name, "", STAGE, rule, "killed", "", "", item.domain, 1, item.size)
            rejects.append(reject_row(one))
        file_bytes = sum(item.size for item in files.items)
        counts = {"records": records.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    told = {} if conversations is None else conversations.counts()
    return counts | {"images": images, "file_bytes": file_bytes} | told


def _of_whole_rows(settings: SimpleNamespace) -> SimpleNamespace:
    """Settings with which rows are read whole, and none is cut, in the first stage."""
    read = SimpleNamespace(**vars(settings.read) | {"text_field": None, "max_chars": sys.maxsize})
    return SimpleNamespace(**vars(settings) | {"read": read})


def read_item(item: Item, build: DataBuild | SimpleNamespace) -> Items:
    """Read an item: its records under the settings `build`, and a reject where it changed meanwhile.

    Raises:
        DataError: the file could be read when it was listed, and cannot any more: what a unit says of it is kept for
            as long as the file has the same bytes.
        TilewrightError, OSError, MemoryError: what `read_file` raises of this machine.
    """
    try:
        for found in _read(item, build):
            if isinstance(found, Rejected) and found.rule == UNREADABLE and not found.part and item.path:
                raise _unreadable(item, str(found.value))
            yield found
        if item.path:
            now = stat_key(os.stat(item.path))
            if item.stat != now:
                value = f"{now.split()[0]} bytes, {item.stat.split()[0]} when it was found"
                yield Rejected(item.name, "", STAGE, "file changed while it was read", value, "", "", item.domain, 0)
    except OSError as error:
        if is_of_machine(error):
            raise
        raise _unreadable(item, str(error.strerror or error)) from error


def _unreadable(item: Item, why: str) -> DataError:
    return DataError(
        "File of a data build cannot be read any more",
        where=item.path or item.name,
        got=why,
        need="the file as it was when the build listed it",
        try_="the same command again: it lists the files again, and finished units stay",
    )


def _read(item: Item, build: DataBuild | SimpleNamespace) -> Items:
    if item.part is not None:
        yield from (replace(found, domain=item.domain) for found in item.part.read())
    else:
        limits = ReadLimits(**build.limits.model_dump())
        read = build.read
        options = ReadOptions(text_field=read.text_field, suffixes=read.suffixes, **build.media.model_dump())
        span = Span(item.start, item.stop) if item.stop else None
        yield from read_file(Path(item.path), item.name, item.domain, limits, options, span)


def _cut(record: Record, max_chars: int) -> Items:
    """Cut a record that was read into pieces of at most `max_chars`, each with an id; a reject where its text cannot be
    written."""
    try:
        data = record.text.encode()
    except UnicodeEncodeError as error:
        place = (record.path, record.part, STAGE, HALF_PAIR, error.reason, "", "", record.domain)
        yield Rejected(*place, 1, len(record.text.encode("utf-8", "surrogatepass")))
        return
    exact = len(data) == record.stop - record.start  # the text is the file's bytes, so pieces have their own places
    at = record.start
    for piece in cut(record, max_chars):
        data = data if piece is record else piece.text.encode()
        part, start = (record.part, at) if exact else (piece.part, piece.start)
        stop = at + len(data) if exact else piece.stop
        yield replace(piece, id=_id(record, part, start, data), part=part, start=start, stop=stop)
        at += len(data)


def _id(record: Record, part: str, start: int, data: bytes) -> str:
    """Id of a record that was read, of place and content: the same piece `data` of a record has the same id in every
    build."""
    place = f"{record.domain}\0{record.path}\0{part}\0{start}\0"
    return xxhash.xxh3_128_hexdigest(place.encode("utf-8", "backslashreplace") + data)


READ = BuildStage(
    *("read", "reading files", 6, per_shard, read_shard),
    ("read.text_field", "read.max_chars", "read.suffixes", "limits", "media"),
    {"files": ShardFiles(), "format": AddedSetting("chat.format")},
)

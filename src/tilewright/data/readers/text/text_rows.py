"""Rows of text: .jsonl, .json, .csv, .tsv, .parquet and .arrow, by the readers of `data.sources`.

A row of .jsonl knows the bytes of its line. The others are known by their number. A legacy encoding is found from the
first MiB of a file's lines: in a single row, too few bytes say which.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from tilewright.core.units import format_bytes
from tilewright.data.common.records import Record, Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.parser_errors import PARSER_ERRORS, damage_of, failure
from tilewright.data.readers.temporary_files import ScratchFile, ScratchFolder
from tilewright.data.readers.text.decode_text import begins_as_utf8, decode_text, wide_encoding_of
from tilewright.data.readers.text.plain_text import BLOCK_BYTES, END_OF_FILE, Items, text_record
from tilewright.data.sources.csv_rows import read_csv
from tilewright.data.sources.decompress import expands_too_much
from tilewright.data.sources.file_lines import segment_lines, too_long
from tilewright.data.sources.json_rows import holds_lines, read_json, row, streamed_rows
from tilewright.data.sources.parquet_and_arrow import arrow_parts, parquet_parts
from tilewright.data.sources.source_parts import Part

_DELIMITER = {"csv": ",", "tsv": "\t"}


def read_rows(entry: Entry, kind: str) -> Items:
    """Read rows of text: the texts of a file of rows (.jsonl, .json, .csv, .tsv, .parquet, .arrow)."""
    field, longest = entry.options.text_field, entry.limits.line_bytes
    with entry.path.open("rb") as file:
        wide = bool(wide_encoding_of(file.read(4096)))
    legacy = "" if wide or kind in ("parquet", "arrow") else _legacy_encoding(entry)
    if kind in ("jsonl", "json") and not wide and (kind == "jsonl" or holds_lines(entry.path)):
        yield from _json_lines(entry, field, legacy)
        return
    if legacy:
        yield from _transcoded(entry, kind, legacy)
        return
    if kind in ("jsonl", "json"):
        reader = streamed_rows if kind == "jsonl" else read_json
        found: Iterable[Record | Rejected] = reader(entry.name, entry.path, field, longest)
    elif kind in ("csv", "tsv"):
        found = read_csv(entry.name, entry.path, _DELIMITER[kind], field, longest)
    elif kind == "parquet":
        found = _of_parts(parquet_parts(entry.domain, entry.name, entry.path, field, entry.limits.ratio, longest))
    else:
        found = _of_parts(arrow_parts(entry.domain, entry.name, entry.path, field, longest))
    yield from _converted(entry, iter(found))


def _of_parts(parts: Iterable[Part | Rejected]) -> Iterator[Record | Rejected]:
    for part in parts:
        if isinstance(part, Rejected):
            yield part
        else:
            yield from part.read()


def _legacy_encoding(entry: Entry) -> str:
    """The encoding of a file with rows of text whose first MiB is in none of Unicode's, and in one alone; else ""."""
    with entry.path.open("rb") as file:
        head = file.read(BLOCK_BYTES).rstrip(END_OF_FILE)
    if begins_as_utf8(head):
        return ""
    whole = head[: head.rfind(b"\n") + 1] or head
    decoded = decode_text(whole.removeprefix(b"\xef\xbb\xbf"))
    if decoded.lost:
        entry.need("charset_normalizer", of_format=False)
    return "" if decoded.lost or "utf-8" in decoded.encoding else decoded.encoding


def _transcoded(entry: Entry, kind: str, encoding: str) -> Items:
    """Rows of text of a file in a legacy encoding, read from a copy in UTF-8."""
    with ScratchFolder() as folder:
        copy = folder / f"rows.{kind}"
        try:
            with entry.path.open(encoding=encoding, newline="") as source, ScratchFile(copy) as target:
                while text := source.read(BLOCK_BYTES):
                    target.write(text.encode())
        except UnicodeError as error:
            yield entry.reject("unknown encoding", f"{encoding}: {failure(error)}", "all bytes decode")
            return
        field, longest = entry.options.text_field, entry.limits.line_bytes
        if kind == "json":
            found = read_json(entry.name, copy, field, longest)
        else:
            found = read_csv(entry.name, copy, _DELIMITER[kind], field, longest)
        yield from _converted(entry, found, {"encoding": encoding})


def _json_lines(entry: Entry, field: str | None, legacy: str) -> Items:
    first, stop = entry.span or (0, entry.path.stat().st_size)
    longest = entry.limits.line_bytes
    for number, (start, line) in enumerate(segment_lines(entry.path, first, stop, longest), 1):
        part = "row" if entry.span else f"row {number}"  # how many rows are before a span is not known
        if len(line) > longest:
            yield entry.reject("line length", f"over {longest}", longest, ascii(line[:60]), part)
            continue
        text, encoding, lost, _ = decode_text(line, legacy)
        if lost:
            entry.need("charset_normalizer", of_format=False)
        if lost or encoding not in ("utf-8", legacy):
            yield entry.reject("row is not UTF-8", encoding or "none fits", "utf-8", ascii(line[:60]), part)
            continue
        stop = start + len(line)
        for item in row(entry.name, f"byte {start}", text.encode(), field):
            if isinstance(item, Rejected):
                yield told(entry, item, part)
            else:
                facts = {"encoding": encoding} if legacy else {}
                yield from text_record(entry, item.text, start, stop, facts, part)


def _converted(entry: Entry, found: Iterator[Record | Rejected], facts: dict[str, str] | None = None) -> Items:
    step = partial(next, found, None)
    while True:
        try:
            item = step()
        except PARSER_ERRORS as error:
            yield entry.reject("damaged file of rows, the rest is lost", damage_of(error))
            return
        if item is None:
            return
        if isinstance(item, Rejected):
            yield told(entry, item)
            continue
        size = len(item.text.encode("utf-8", "surrogatepass"))
        if size > entry.limits.line_bytes:  # a table's reader bounds blocks of rows, and not each row
            yield entry.reject("line length", float(size), entry.limits.line_bytes, num_bytes=size)
            continue
        part = item.part.replace("line ", "row ")  # ids of records are made of it
        yield from text_record(entry, item.text, 0, 0, facts or {}, part)


def told(entry: Entry, reject: Rejected, part: str = "") -> Rejected:
    """A reject of `data.sources` on rows of text as one of the build, with value and threshold where a limit was
    passed."""
    limits, rejected = entry.limits, partial(entry.reject, part=part, count=reject.count, num_bytes=reject.num_bytes)
    if reject.rule == too_long("", limits.line_bytes, 0).rule:
        return rejected("line length", float(reject.num_bytes), limits.line_bytes)
    if reject.rule == expands_too_much("", 0, 0, limits.ratio).rule:
        return rejected("compression ratio", reject.value, limits.ratio)
    if "straddling object" in str(reject.value):  # so Arrow says that a row is longer than a block
        value = f"over {format_bytes(limits.line_bytes)}"
        return rejected("line length", value, limits.line_bytes, str(reject.value))
    return rejected(reject.rule, reject.value)

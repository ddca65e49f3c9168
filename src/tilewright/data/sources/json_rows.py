"""Rows of text out of JSON: one row per line (.jsonl), or a .json file with rows in it.

A .json file holds an array of rows, one object with a list of rows in it, one object that is a row, or one row per
line. Arrays are read in bounded memory: a row has a greatest length. A row is an object with the text in a field, or,
in an array that is the whole file, the text itself. Lists of other values in an object are no rows and are counted.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tilewright.data.common.records import Record, Rejected, rejected, text_of
from tilewright.data.sources.decompress import utf8_pieces
from tilewright.data.sources.file_lines import LONGEST_LINE, streamed_lines, too_long

_MARK = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|(?P<open>\\?\Z))|[\[\]{},]', re.DOTALL)


_ROW_KEYS = {"messages", "conversations", "conversation", "chosen", "rejected", "instruction", "prompt"}
"""Of an object that is itself a row, where whole rows are wanted: one with other lists in it is a file of rows."""


def whole_row(value: dict) -> str:
    """A whole row of JSON as one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


def row(name: str, at: str, line: bytes, field: str | None, *, bare: bool = False) -> Iterator[Record | Rejected]:
    """The text of one JSON row, or why there is none.

    Args:
        name: of the file.
        at: place in it, as "line 3".
        line: the row as UTF-8, with its line end: a last one without may be half-written.
        field: of the object that holds the text; None: the whole object is wanted, as JSON.
        bare: a row may also be the text itself.
    """
    data = line.removeprefix(codecs.BOM_UTF8)
    if not data.strip():
        return

    def reject(reason: str, example: str) -> Rejected:
        return rejected(name, reason, f"{at}: {example}", num_bytes=len(line))

    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        yield reject("line is not UTF-8", f"byte 0x{data[error.start]:02x}")
        return
    except RecursionError:
        yield reject("JSON nested too deep", "brackets in brackets")
        return
    except ValueError as error:
        whole = bare or line.endswith(b"\n")
        yield reject("line is not JSON" if whole else "half-written last line", str(error))
        return
    yield from _text(name, at, value, field, reject, bare)


def _text(name: str, at: str, value: object, field: str | None, reject, bare: bool) -> Iterator[Record | Rejected]:
    if bare and isinstance(value, str) and field is not None:
        value = {field: value}
    if not isinstance(value, dict):
        yield reject("row is not an object", type(value).__name__)
    elif field is None:
        yield text_of(name, whole_row(value), at)
    elif field not in value:
        yield reject(f"no field {field!r}", f"fields {', '.join(str(k)[:40] for k in list(value)[:8])}")
    elif not isinstance(value[field], str):
        yield reject(f"field {field!r} is not text", type(value[field]).__name__)
    else:
        yield text_of(name, value[field], at)


def streamed_rows(name: str, path: Path, field: str | None, longest: int = LONGEST_LINE) -> Iterator[Record | Rejected]:
    """Rows of JSON lines (.jsonl), one per line, from the file's first line on."""
    for number, line in enumerate(streamed_lines(name, path, longest), 1):
        if isinstance(line, Rejected):
            yield line
        else:
            yield from row(name, f"line {number}", line, field)


def holds_lines(path: Path) -> bool:
    """True if the .json file at `path` has a whole object in its first line and something after it."""
    with path.open("rb") as file:
        head = file.readline(1 << 20).removeprefix(codecs.BOM_UTF8)
        if not head.endswith(b"\n") or not head.strip().startswith(b"{") or not file.read(1):
            return False
    try:
        return isinstance(json.loads(head), dict)
    except (ValueError, RecursionError):
        return False


def read_json(name: str, path: Path, field: str | None, longest: int = LONGEST_LINE) -> Iterator[Record | Rejected]:
    """Rows of a .json file of at most `longest` bytes; see the top of this file for what it may hold."""
    lost: list[Rejected] = []
    pieces = _decoded(name, path, lost)
    head = ""
    for piece in pieces:
        head += piece
        if head.lstrip():
            break
    kind = head.lstrip()[:1]
    if kind == "{":
        for piece in pieces:
            head += piece
            if len(head) > longest:
                break
        else:
            yield from _whole(name, head, field, lost, longest)
            return
    if kind in ("{", "["):
        yield from _rows_in_list(name, head, pieces, field, 1 + (kind == "{"), longest)
    elif head.strip():
        yield rejected(name, "JSON without rows", f"begins with {head.lstrip()[:20]!r}")
    yield from lost


def _decoded(name: str, path: Path, lost: list[Rejected]) -> Iterator[str]:
    """Decoded text of a JSON file; bytes that are not UTF-8 become surrogates, so that their row alone is refused."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for piece in utf8_pieces(name, path):
        if isinstance(piece, Rejected):
            lost.append(piece)
            return
        yield decoder.decode(piece)
    yield decoder.decode(b"", True)


def _whole(name: str, text: str, field: str | None, lost: list[Rejected], longest: int) -> Iterator[Record | Rejected]:
    """The rows of a JSON object that is in memory whole."""
    data = text.encode("utf-8", "surrogateescape")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = {field: None}  # what is wrong, `row` says
    lists = [item for item in value.values() if isinstance(item, list)] if isinstance(value, dict) else []
    is_row = bool(_ROW_KEYS.intersection(value)) if field is None else isinstance(value.get(field), str)
    if lost:
        yield from lost
    elif lists and not is_row:
        yield from _rows_in_list(name, text, iter(()), field, 2, longest)
    else:
        yield from row(name, "line 1", data, field)


def _rows_in_list(
    name: str, head: str, pieces: Iterator[str], field: str | None, depth: int, longest: int
) -> Iterator[Record | Rejected]:
    """Yield the items of every JSON list that opens at `depth`: 1 for the outermost value, 2 for those in it."""
    others, size, example = 0, 0, ""
    for number, item in enumerate(_items(head, pieces, depth, longest), 1):
        if isinstance(item, str) and depth > 1 and not item.lstrip().startswith("{"):
            others, size, example = others + 1, size + len(item), example or item.strip()[:40]
        elif isinstance(item, str) and len(item) > longest:
            yield too_long(name, longest, len(item))
        elif isinstance(item, str):
            yield from row(name, f"row {number}", item.encode("utf-8", "surrogateescape"), field, bare=True)
        elif item < 0:
            yield rejected(name, "truncated JSON, the rest is lost", num_bytes=-item)
        else:
            yield too_long(name, longest, item)
    if others:
        yield rejected(name, "list of values in an object, not of rows", f"as {example}", count=others, num_bytes=size)


def _items(text: str, pieces: Iterator[str], depth: int, longest: int) -> Iterator[str | int]:
    """Yield the texts between the commas of the JSON lists at `depth`. For one that is too long its length, for one
    that the file breaks off in, its length as a negative number."""
    level, at, start, dropped, inside = 0, 0, 0, 0, False
    while True:
        for match in _MARK.finditer(text, at):
            mark = match[0]
            if match["open"] is not None:  # a string that goes on in the next piece
                at = match.start()
                break
            at = match.end()
            if mark in ("[", "{"):
                level += 1
                if level == depth and mark == "[":
                    inside, start, dropped = True, at, 0
            elif mark in ("]", "}", ","):
                closes = mark != ","
                if inside and level == depth:
                    item = text[start : match.start()]
                    if dropped:
                        yield dropped + len(item)
                    elif item.strip():
                        yield item
                    inside, start, dropped = not closes, at, 0
                level -= closes
        else:
            at = max(at, len(text)) if '"' not in text[at:] else at
        keep = start if inside else at
        if at - keep > longest or len(text) - keep > 2 * longest:
            dropped += at - keep
            keep = at
            if len(text) - at > 2 * longest:  # one string that does not end
                yield dropped + len(text) - at
                return
        text, at, start = text[keep:], at - keep, 0
        more = next(pieces, None)
        if more is None:
            if inside or level > 0:
                yield -max(1, len(text) + dropped)
            return
        text += more

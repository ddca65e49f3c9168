"""Web archives (WARC 1.0 and 1.1, ISO 28500): the pages and texts in one, each as a file that is read like any other.

Of a crawl: answers with status 200, resources and conversions (WET). Their block is the answer of a server, with
headers, in chunks or compressed where it says so. What is not read, such as requests and metadata, is counted.
`.warc.gz` is unpacked before.
"""

import zlib
from collections.abc import Iterator
from typing import IO

from tilewright.data.common.records import Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.temporary_files import ScratchFile, ScratchFolder
from tilewright.data.readers.unpack import UnpackBudget
from tilewright.data.sources.source_parts import printable

_LINE_BYTES, _MOST_LINES = 1 << 16, 1000
_PIECE = 1 << 20
_READ = ("response", "resource", "conversion")
_SUFFIXES = {
    **dict.fromkeys(("text/html", "application/xhtml+xml"), ".html"),
    **{"text/plain": ".txt", "text/markdown": ".md", "application/json": ".json", "application/pdf": ".pdf"},
    **{"text/csv": ".csv", "image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp", "image/gif": ".gif"},
}


class _DamageError(Exception):
    """A record that is not as WARC has them."""


def unpack_warc(entry: Entry) -> Iterator[list[Entry] | Rejected]:
    """Unpack a web archive (WARC): yields its pages in order, one at a time in a temporary file."""
    size, others = entry.path.stat().st_size, 0
    budget = UnpackBudget(entry, size)
    with entry.path.open("rb") as file:
        at = 0
        while at < size:
            file.seek(at)
            # Without a header there is no length, so the next record cannot be found.
            try:
                fields, length = _header(file)
            except _DamageError as error:
                yield entry.reject("damaged WARC, the rest is lost", str(error), "a record", num_bytes=size - at)
                break
            start = file.tell()
            # The next record is behind the length, whatever this one holds.
            at = start + length
            problem = budget.another()
            if problem:
                yield problem
                break
            if at > size:
                yield entry.reject("truncated WARC, the rest is lost", float(size), float(at), num_bytes=size - start)
                break
            if fields.get("warc-type") in _READ:
                yield from _page(entry, budget, file, fields, length)
            else:
                others += 1
            file.seek(at)
            at = _next_record(file, at)
    if others:
        yield entry.reject(
            "record of a WARC that is no page", float(others), "response, resource, conversion", count=others
        )


def _page(
    entry: Entry, budget: UnpackBudget, file: IO[bytes], fields: dict[str, str], length: int
) -> Iterator[list[Entry] | Rejected]:
    # 1. The record, within the limit of a document.
    shown = printable(fields.get("warc-target-uri", "").strip("<>")[:300]) or "a record without an address"
    if length > entry.limits.document_bytes:
        yield entry.reject("document size in bytes", float(length), entry.limits.document_bytes, part=shown)
        return
    data, kind = file.read(length), fields.get("content-type", "")
    # 2. An HTTP answer: status and headers around the page; only 200 has the page that was asked for.
    if kind.startswith("application/http"):
        try:
            status, headers, data = http_answer(data, entry.limits.document_bytes)
        except (_DamageError, zlib.error, ValueError) as error:
            yield entry.reject("damaged answer in a WARC", str(error), part=shown, num_bytes=length)
            return
        if status != 200:
            yield entry.reject("answer without a page", float(status), 200.0, part=shown, num_bytes=length)
            return
        kind = headers.get("content-type", "")
    # 3. The budget of the archive, in decompressed bytes.
    problem = budget.spend(len(data))
    if problem:
        yield problem
        return
    suffix = _SUFFIXES.get(kind.partition(";")[0].strip().lower())
    if suffix is None or not data:
        yield entry.reject("file type is not read", kind[:60] or "none", "text, image", part=shown, num_bytes=length)
        return
    # 4. A file with the suffix of its type, which is read like any other.
    with ScratchFolder() as folder:
        target = folder / f"page{suffix}"
        with ScratchFile(target) as out:
            out.write(data)
        yield [entry.member(target, target.name, shown)]


def _header(file: IO[bytes]) -> tuple[dict[str, str], int]:
    """Read the header of a web archive's record: fields in small letters, and the bytes of its block, which is next."""
    first = file.readline(_LINE_BYTES)
    if not first.startswith(b"WARC/"):
        raise _DamageError(f"{first[:40]!a} where a record begins")
    fields = _fields(file)
    length = fields.get("content-length", "")
    if not length.isdecimal():
        raise _DamageError("a record without its length")
    return fields, int(length)


def _fields(file: IO[bytes]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for _ in range(_MOST_LINES):
        line = file.readline(_LINE_BYTES)
        if not line.strip():
            return fields
        name, _, value = line.decode("utf-8", "replace").partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    raise _DamageError("a header without an end")


def _next_record(file: IO[bytes], at: int) -> int:
    """Where the next record of a web archive begins after the line ends behind one."""
    while (line := file.readline(_LINE_BYTES)) and not line.strip():
        at += len(line)
    return at


def http_answer(block: bytes, most: int) -> tuple[int, dict[str, str], bytes]:
    """Read a server's answer in a web archive: status, headers in small letters and body; nothing of the body after
    `most` bytes.

    Example:
        >>> http_answer(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n2\\r\\nhi\\r\\n0\\r\\n\\r\\n", 9)
        (200, {'transfer-encoding': 'chunked'}, b'hi')
    """
    head, _, body = block.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/") or not parts[1].isdecimal():
        raise _DamageError(f"{first[:40]!r} where an answer begins")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = _joined(body)
    coding = headers.get("content-encoding", "").lower()
    if coding in ("gzip", "x-gzip", "deflate") and body:
        decoder = zlib.decompressobj(wbits=47)  # gzip or zlib, as its first bytes say
        body = decoder.decompress(body, most + 1)
        if len(body) > most:
            raise _DamageError(f"a page of more than {most} bytes")
    elif coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise _DamageError(f"content in {coding[:20]!r}")
    return int(parts[1]), headers, body


def _joined(body: bytes) -> bytes:
    """The chunks of a body in a web archive joined; one that is not in chunks as it is: crawlers leave the header of
    what they joined."""
    pieces, at = [], 0
    while True:
        end = body.find(b"\r\n", at, at + 64)
        try:
            size = int(body[at:end].partition(b";")[0], 16) if end >= 0 else -1
        except ValueError:
            size = -1
        if size < 0:
            return b"".join(pieces) if pieces else body
        if not size:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2

"""HTML, notebooks, .docx, EPUB and PDF as records of text: parsed by a process of its own, within limits."""

import os
import signal
from collections.abc import Iterator
from typing import Any

from tilewright.core.errors import HardwareError
from tilewright.data.common.records import Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.parser_process import parser_process
from tilewright.data.readers.text.decode_text import Decoded, decode_text, wide_encoding_of
from tilewright.data.readers.text.detect_encoding import declared_encoding
from tilewright.data.readers.text.plain_text import Items, binary, lost_lines, text_record
from tilewright.data.sources.source_parts import BINARY_HEAD, looks_binary


def read_html(entry: Entry) -> Items:
    """Read an HTML document: one record with its main text, its title as a fact."""
    size, longest = entry.path.stat().st_size, entry.limits.document_bytes
    if size > longest:
        yield entry.reject("document size in bytes", float(size), longest, num_bytes=size)
        return
    entry.need("selectolax")
    data = entry.path.read_bytes()
    wide = wide_encoding_of(data[:4096])
    text = data.decode(wide, "replace") if wide else ""
    if looks_binary(text[:BINARY_HEAD].encode() if wide else data):
        yield binary(entry, size)
        return
    if wide:
        decoded = Decoded(text, wide, [])
    else:
        decoded = decode_text(data.removeprefix(b"\xef\xbb\xbf"), declared_encoding(data))
    if decoded.lost:
        yield lost_lines(entry, decoded.lost, decoded.encoding)
    for item in _parsed(entry, kind="html", html=decoded.text):
        if isinstance(item, Rejected):
            yield item
        elif "error" in item:
            yield entry.reject("damaged HTML", item["error"], num_bytes=size)
        else:
            facts = {**decoded.facts, "title": item["title"][:200], "html_language": item["language"]}
            facts = {name: value for name, value in facts.items() if value}
            yield from text_record(entry, item["text"], 0, size, facts)


def read_pdf(entry: Entry) -> Items:
    """Read a PDF: a record per page. Where the parser is ended, no page stays: which did would depend on the
    machine."""
    entry.need("pypdf")
    limits, size = entry.limits, entry.path.stat().st_size
    asked = {"path": str(entry.path), "max_pages": limits.pages, "max_bytes": limits.document_bytes}
    # All pages before the first is given: the parser's process may be ended in the middle.
    found = list(_parsed(entry, kind="pdf", **asked))
    ended = [item for item in found if isinstance(item, Rejected)]
    if ended:
        yield from ended
        return
    blank = 0
    # A page is text, blank or damaged; one item without a page says what limits cut off.
    for item in found:
        part = f"page {item['page']}" if "page" in item else ""
        if "encrypted" in item:
            yield entry.reject("encrypted PDF", "a password", "none", num_bytes=size)
        elif "error" in item:
            yield entry.reject("damaged page" if part else "damaged PDF", item["error"], part=part)
        elif "pages" in item:
            if item["pages"] > limits.pages:
                left = item["pages"] - limits.pages
                yield entry.reject("pages", float(item["pages"]), limits.pages, count=left)
            if item["bytes"] > limits.document_bytes:
                yield entry.reject("text of a document in bytes", float(item["bytes"]), limits.document_bytes)
        elif not item["text"].strip():
            blank += 1
        else:
            yield from text_record(entry, item["text"], 0, 0, {"page": item["page"]}, part)
    if blank:
        yield entry.reject("page without text", float(blank), 0.0, count=blank)
    # A PDF that was opened may still have lost its end.
    if not any("encrypted" in item or ("error" in item and "page" not in item) for item in found):
        yield from _without_end(entry, size)


def read_notebook(entry: Entry) -> Items:
    """Read a Jupyter notebook: one record of its cells, code in fences."""
    size, longest = entry.path.stat().st_size, entry.limits.document_bytes
    if size > longest:
        yield entry.reject("document size in bytes", float(size), longest, num_bytes=size)
        return
    text = entry.path.read_bytes().decode("utf-8-sig", "replace")
    yield from _documents(entry, "damaged notebook", kind="notebook", text=text)


def read_word(entry: Entry) -> Items:
    """Read a .docx: one record of its paragraphs, its title as a fact."""
    entry.need("defusedxml")
    yield from _documents(entry, "damaged .docx", kind="docx", **_packed(entry))


def read_book(entry: Entry) -> Items:
    """Read an EPUB: a record per chapter. Where one is too large, or the parser is ended, no chapter stays."""
    entry.need("selectolax")
    entry.need("defusedxml")
    yield from _documents(entry, "damaged EPUB", kind="epub", **_packed(entry))


def _packed(entry: Entry) -> dict[str, Any]:
    return {"path": str(entry.path), "max_bytes": entry.limits.document_bytes}


def _documents(entry: Entry, damaged: str, **request: Any) -> Items:
    """The records of a parsed document that comes whole, or chapter by chapter; a reject with the rule `damaged`."""
    size, found = _size(entry), list(_parsed(entry, **request))
    ended = [item for item in found if isinstance(item, Rejected)]
    if ended:
        yield from ended
        return
    too_large = next((item["error"] for item in found if "large" in item), "")
    if too_large:
        longest = entry.limits.document_bytes
        yield entry.reject("text of a document in bytes", too_large, longest, num_bytes=size)
        return
    for item in found:
        part = f"chapter {item['chapter']}" if "chapter" in item else ""
        if "encrypted" in item:
            yield entry.reject("encrypted EPUB", "a key", "none", num_bytes=size)
        elif "error" in item:
            yield entry.reject(damaged, item["error"], part=part, num_bytes=0 if part else size)
        else:
            text = item["text"].encode("utf-8", "replace").decode()
            facts = {"title": item["title"].strip()[:200]} if item["title"].strip() else {}
            yield from text_record(entry, text, 0, 0 if part else size, facts, part)


def _without_end(entry: Entry, size: int) -> Iterator[Rejected]:
    """A reject of a parsed document if the mark at the end of a PDF is not there: the parser finds what pages it can,
    and says nothing."""
    with entry.path.open("rb") as file:
        file.seek(max(0, size - 2048))
        if b"%%EOF" not in file.read():
            yield entry.reject("truncated PDF, pages may be lost", "no %%EOF", "%%EOF at the end", count=0)


def _parsed(entry: Entry, **request: Any) -> Iterator[Any]:
    """Yield the documents that the parser's process answers, with a reject if a signal ended it.

    Raises:
        OSError: the process cannot be started, or cannot open a file for what this machine lacks.
        HardwareError: it stopped by itself, which no document makes it do.
    """
    limits = entry.limits
    for item in parser_process(os.getpid()).ask(limits.parse_s, limits.parse_memory_bytes, **request):
        if "errno" in item:
            raise OSError(item["errno"], item["error"])
        if item.get("killed") == 0:
            raise HardwareError(
                "Process that parses documents stopped by itself",
                got="no memory or no open files to load its parser with",
                need="address space (ulimit -v) and open files (ulimit -n) for another process",
                try_="higher limits, and the same command again",
            )
        if item.get("killed") == signal.SIGPROF:
            value = f"over {limits.parse_s}"
            yield entry.reject("parser's processor seconds", value, limits.parse_s, num_bytes=_size(entry))
        elif "killed" in item or str(item.get("error", "")).startswith("MemoryError"):
            value = f"ended, signal {item['killed']}" if "killed" in item else "MemoryError"
            yield entry.reject("parser's memory in bytes", value, limits.parse_memory_bytes, num_bytes=_size(entry))
        else:
            yield item


def _size(entry: Entry) -> int:
    return entry.path.stat().st_size

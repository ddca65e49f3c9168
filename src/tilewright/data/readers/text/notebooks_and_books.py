"""Text out of notebooks, Word documents and e-books: what the parser's process (`worker`) does with one of them.

A member of a zip is read to a bound, whatever its directory says. XML is read by defusedxml, which refuses entities.
Imports only what that needs.
"""

import json
import posixpath
import zipfile
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tilewright.data.readers.text.html_and_pdf import html_document

_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_BOOK = "{http://www.idpf.org/2007/opf}"
_CONTAINER = "{urn:oasis:names:tc:opendocument:xmlns:container}"
_TITLE = "{http://purl.org/dc/elements/1.1/}title"
_CHAPTERS = ("application/xhtml+xml", "text/html")


class TooLargeError(Exception):
    """A document whose parts or text are larger than it may be."""


def notebook_document(text: str) -> dict[str, str]:
    """Read a Jupyter notebook's cells: Markdown as it is, code in fences; the printed results are left out.

    Example:
        >>> cells = [{"cell_type": "markdown", "source": ["# A\\n", "b"]}, {"cell_type": "code", "source": "x = 1"}]
        >>> notebook_document(json.dumps({"cells": cells}))["text"]
        '# A\\nb\\n\\n```python\\nx = 1\\n```'
    """
    book = json.loads(text)
    if not isinstance(book, dict):
        raise ValueError("a notebook that is no object")
    sheets = [book, *(sheet for sheet in _list(book.get("worksheets")) if isinstance(sheet, dict))]  # format 3
    about = book.get("metadata")
    about = about if isinstance(about, dict) else {}
    kernel = about.get("language_info") or about.get("kernelspec")
    language = str((kernel.get("language") or kernel.get("name") or "") if isinstance(kernel, dict) else "")
    cells = [cell for sheet in sheets for cell in _list(sheet.get("cells")) if isinstance(cell, dict)]
    if not cells and "cells" not in book:
        raise ValueError("a notebook without cells")
    parts = []
    for cell in cells:
        source = cell.get("source", cell.get("input", ""))
        body = "".join(s for s in source if isinstance(s, str)) if isinstance(source, list) else str(source)
        if body.strip():
            code = cell.get("cell_type") == "code"
            parts.append(f"```{language[:20] or 'python'}\n{body}\n```" if code else body)
    return {"title": "", "language": "", "text": "\n\n".join(parts)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def word_document(path: str, max_bytes: int) -> dict[str, str]:
    """A Word document's paragraphs (.docx), a line each; cells of a table have tabs between them. Deleted text is left
    out."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        body = _xml(_member(archive, "word/document.xml", max_bytes))
        title = ""
        if "docProps/core.xml" in names:
            found = _xml(_member(archive, "docProps/core.xml", max_bytes)).find(_TITLE)
            title = (found.text or "") if found is not None else ""
    lines: list[str] = []
    held: list[str] = []
    for event, node, in_cell in _walk(body):
        tag = node.tag
        if event == "start":
            if tag == f"{_WORD}t":
                held.append(node.text or "")
            elif tag in (f"{_WORD}tab", f"{_WORD}tc") and held:
                held.append("\t")
            elif tag in (f"{_WORD}br", f"{_WORD}cr"):
                held.append("\n")
        elif tag == f"{_WORD}p" and in_cell:
            held.append(" ")
        elif tag in (f"{_WORD}tr", f"{_WORD}p"):
            lines.append("".join(held).strip())
            held = []
    return {"title": title, "language": "", "text": _bounded("\n".join([*lines, "".join(held)]).strip("\n"), max_bytes)}


def _walk(root: Any) -> Iterator[tuple[str, Any, bool]]:
    """Walk a Word document: ("start" or "end", node, whether it is in a cell), without recursion; a second rendering is
    left out."""
    todo = [("start", root, False)]
    while todo:
        event, node, cell = todo.pop()
        if node.tag == _FALLBACK:
            continue
        yield event, node, cell
        if event == "start":
            inside = cell or node.tag == f"{_WORD}tc"
            todo.append(("end", node, cell))
            todo += [("start", below, inside) for below in reversed(node)]


def book_chapters(path: str, max_bytes: int) -> Iterator[dict[str, Any]]:
    """A book's chapters, of an EPUB, in the order of its spine, each as {"chapter", "title", "text"}."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        # encryption.xml may be there and list nothing.
        if "META-INF/encryption.xml" in names and b"EncryptedData" in _member(
            archive, "META-INF/encryption.xml", max_bytes
        ):
            yield {"encrypted": True}
            return
        # container.xml names the book's file, which lists members by id, and their order (the spine).
        root = _xml(_member(archive, "META-INF/container.xml", max_bytes)).find(f".//{_CONTAINER}rootfile")
        if root is None:
            raise ValueError("a container without a root file")
        where = root.attrib["full-path"]
        book = _xml(_member(archive, where, max_bytes))
        items = {item.attrib.get("id"): item.attrib for item in book.iter(f"{_BOOK}item")}
        found = book.find(f".//{_TITLE}")
        title, left = (found.text or "") if found is not None else "", max_bytes
        for number, entry in enumerate(book.iter(f"{_BOOK}itemref"), 1):
            item = items.get(entry.attrib.get("idref"), {})
            name = posixpath.normpath(posixpath.join(posixpath.dirname(where), unquote(item.get("href", ""))))
            # A table of contents only repeats titles.
            if item.get("media-type") not in _CHAPTERS or "nav" in item.get("properties", "").split():
                continue
            if name not in names:
                yield {"chapter": number, "error": f"no member {name}"[:200]}
                continue
            page = html_document(_member(archive, name, max_bytes).decode("utf-8", "replace"))
            # Of all chapters together: a small archive may unpack to any size.
            left -= len(page["text"].encode())
            if left < 0:
                raise TooLargeError(f"text of more than {max_bytes} bytes")
            yield {"chapter": number, "title": title, "text": page["text"]}


def _member(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    with archive.open(name) as member:
        data = member.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLargeError(f"member {name} of more than {max_bytes} bytes"[:200])
    return data


def _xml(data: bytes) -> Any:
    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import ParseError, fromstring

    try:
        return fromstring(data)
    except (DefusedXmlException, ParseError) as error:
        raise ValueError(f"damaged XML: {error}") from error


def _bounded(text: str, max_bytes: int) -> str:
    if len(text.encode("utf-8", "replace")) > max_bytes:
        raise TooLargeError(f"text of more than {max_bytes} bytes")
    return text

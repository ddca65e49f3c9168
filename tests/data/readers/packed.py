"""Notebooks, .docx, EPUB and web archives, made in memory."""

import gzip
import json

from tests.data.readers.made import zip_bytes

_W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
_MC = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'


def notebook_bytes() -> bytes:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Some words."]},
        {"cell_type": "code", "source": "x = 1\nprint(x)", "outputs": [{"text": ["SECRET"]}]},
        {"cell_type": "raw", "source": ""},
    ]
    return json.dumps({"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4}).encode()


def docx_bytes(paragraphs: tuple[str, ...] = ("First paragraph.", "Second café.")) -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    body += (
        "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>a</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>b</w:t></w:r></w:p></w:tc>"
    )
    body += "</w:tr></w:tbl><w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:r><w:t>kept</w:t></w:r></w:p>"
    body += (
        "<mc:AlternateContent><mc:Fallback><w:p><w:r><w:t>twice</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent>"
    )
    core = '<p xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>The title</dc:title></p>'
    return zip_bytes(
        {
            "[Content_Types].xml": b"<Types/>",
            "word/document.xml": f"<w:document {_W} {_MC}><w:body>{body}</w:body></w:document>".encode(),
            "docProps/core.xml": core.encode(),
        }
    )


def epub_bytes(chapters: tuple[str, ...] = ("Chapter one.", "Chapter two.")) -> bytes:
    items = "".join(
        f'<item id="c{i}" href="text/c%20{i}.xhtml" media-type="application/xhtml+xml"/>' for i in range(len(chapters))
    )
    spine = "".join(f'<itemref idref="c{i}"/>' for i in reversed(range(len(chapters))))
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
        f"<dc:title>A book</dc:title></metadata><manifest>{items}</manifest><spine>{spine}</spine></package>"
    )
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    )
    members = {
        "mimetype": b"application/epub+zip",
        "META-INF/container.xml": container.encode(),
        "OEBPS/book.opf": package.encode(),
        "OEBPS/style.css": b"p { color: red }",
    }
    pages = {f"OEBPS/text/c {i}.xhtml": f"<html><body><p>{text}</p></body></html>" for i, text in enumerate(chapters)}
    return zip_bytes(members | {name: page.encode() for name, page in pages.items()})


def warc_record(kind: str, address: str, block: bytes, content: str = "application/http; msgtype=response") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {address}\r\nContent-Type: {content}\r\n"
    return f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def answer(body: bytes, status: int = 200, kind: str = "text/html", **headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} X",
        f"Content-Type: {kind}",
        *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def page(text: str) -> bytes:
    return f"<html><body><p>{text}</p></body></html>".encode()


def warc_bytes() -> bytes:
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(page("In chunks.")), page("In chunks."))
    return b"".join(
        [
            warc_record("warcinfo", "", b"software: test\r\n", "application/warc-fields"),
            warc_record("request", "http://a/1", b"GET / HTTP/1.1\r\n\r\n"),
            warc_record("response", "http://a/1", answer(page("Page one."))),
            warc_record("response", "http://a/2", answer(gzip.compress(page("In gzip.")), Content_Encoding="gzip")),
            warc_record("response", "http://a/3", answer(chunked, Transfer_Encoding="chunked")),
            warc_record("response", "http://a/4", answer(b"gone", 404)),
            warc_record("response", "http://a/5", answer(b"x{}", kind="font/woff2")),
            warc_record("conversion", "http://a/6", "Plain café text.".encode(), "text/plain"),
        ]
    )

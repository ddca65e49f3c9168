"""The kind of a file: by its first bytes where they tell, else by its suffix.

A text file has no magic bytes, so the suffix decides how text is read. A suffix that nothing here knows is refused even
if the bytes are text: keys, caches and drawings are text, too. `read.suffixes` of a build says what others are. A file
without a suffix is text, HTML or rows of JSON, as its beginning looks.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import PurePath

from tilewright.data.sources.user_files import TEXT_SUFFIXES

COMPRESSED_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0"}
"""Suffix of a compressed file -> its first bytes."""
HEAD_BYTES = 4096
"""Bytes from the start of a file that decide."""

_MAGIC = (
    *((kind, 0, magic) for kind, magic in COMPRESSED_MAGIC.items() if kind != ".bz2"),
    *(("zip", 0, b"PK\x03\x04"), ("zip", 0, b"PK\x05\x06"), ("tar", 257, b"ustar")),
    *(("parquet", 0, b"PAR1"), ("arrow", 0, b"ARROW1")),
    *(
        ("image", 0, b"\x89PNG\r\n\x1a\n"),
        ("image", 0, b"\xff\xd8\xff"),
        ("image", 0, b"GIF87a"),
        ("image", 0, b"GIF89a"),
    ),
    *(("image", 0, b"II*\0"), ("image", 0, b"MM\0*"), ("image", 8, b"WEBP")),
    *(
        ("audio", 8, b"WAVE"),
        ("audio", 0, b"fLaC"),
        ("audio", 0, b"OggS"),
        ("audio", 8, b"AIFF"),
        ("audio", 8, b"AIFC"),
    ),
    *(("audio", 0, b"ID3"), ("warc", 0, b"WARC/1.")),
)
_SUFFIXES = {
    **dict.fromkeys((".htm", ".html", ".xhtml"), "html"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{f".{kind}": kind for kind in ("json", "csv", "tsv", "parquet", "arrow", "pdf", "zip", "tar")},
    **{".epub": "epub", ".docx": "docx", ".ipynb": "notebook", ".warc": "warc", ".wet": "warc"},
    **{".whl": "zip", ".tgz": ".gz", ".caption": "text"},
    **{kind: kind for kind in COMPRESSED_MAGIC},
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"), "image"),
    **dict.fromkeys((".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au"), "audio"),
}
_OFFICE = (".xlsx", ".pptx", ".odt", ".ods", ".odp", ".doc", ".xls", ".ppt", ".rtf")
_HTML = re.compile(rb"\s*+(?:<!--(?>.*?-->)\s*+)*+<(?:!doctype\s+html|html[\s>])", re.IGNORECASE | re.DOTALL)


NOT_READ = "none"
"""What a setting says of a suffix whose files are left out."""
KINDS = tuple(dict.fromkeys(("text", *(kind for kind in _SUFFIXES.values() if not kind.startswith(".")), NOT_READ)))
"""What a setting may say of a suffix."""
SUFFIX = re.compile(r"\.[^\s./A-Z]+")
"""What a setting may call one."""
_ROW = re.compile(rb'\s*+\{[^\n]*\}[ \t\r]*(?:\n\s*\{|\n?\Z)|\s*+\{\s*"[^\n]*\Z')
"""A first line that is an object, before one that begins one; or an object whose line is longer than what is seen."""


def kind_of(name: str, head: bytes, suffixes: Mapping[str, str] | None = None) -> str:
    """The kind of a file called `name` that begins with `head`.

    Args:
        name: of the file.
        head: its first bytes.
        suffixes: suffix -> one of `KINDS`, before what this module knows of it; the first bytes go before it, but where
            it says that such files are not read.

    Returns:
        text, html, markdown, jsonl, json, csv, tsv, parquet, arrow, pdf, notebook, docx, epub, warc, image, audio, zip,
        tar, office (of an office program, which nothing here reads), or the suffix of a compressed file (.gz, .zst,
        .bz2, .xz); "" where it is none of these.

    Example:
        >>> kind_of("a.dat", b"%PDF-1.7"), kind_of("notes.txt", b"plain"), kind_of("server.key", b"-----BEGIN")
        ('pdf', 'text', '')
    """
    suffix = PurePath(name).suffix.lower()
    chosen = (suffixes or {}).get(suffix, "")
    if chosen == NOT_READ:
        return ""
    if suffix in _OFFICE and not chosen and not _HTML.match(head):
        return "office"
    for kind, at, magic in _MAGIC:
        if head.startswith(magic, at) and (at != 8 or head[:4] in (b"RIFF", b"FORM")):
            inside = chosen or _SUFFIXES.get(suffix, "")
            return inside if kind == "zip" and inside in ("docx", "epub") else kind
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return ".bz2"
    if b"%PDF-" in head[:1024]:
        return "pdf"
    known = chosen or _SUFFIXES.get(suffix) or ("text" if not suffix or suffix in TEXT_SUFFIXES.split() else "")
    if known in ("", "text", "docx") and not chosen and _HTML.match(head):
        return "html"
    if not suffix and not chosen:
        start = head.removeprefix(b"\xef\xbb\xbf")
        return "jsonl" if _ROW.match(start) else "json" if re.match(rb"\s*\[\s*\{", start) else known
    return known


@cache
def media_suffixes() -> tuple[str, ...]:
    """Suffixes of the kinds of file that are images and sounds, which a text file of the same name may describe."""
    return tuple(suffix for suffix, kind in _SUFFIXES.items() if kind in ("image", "audio"))

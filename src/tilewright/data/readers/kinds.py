"""What a file is: by its first bytes where they say it, else by its suffix.

A text file has no magic bytes, so the suffix decides how text is read. A suffix that nothing here knows is refused even
if the bytes are text: keys, caches and drawings are text, too.
"""

import re
from functools import cache
from pathlib import PurePath

from tilewright.data.sources.files import TEXT_SUFFIXES

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
    ("audio", 0, b"ID3"),
)
_SUFFIXES = {
    **dict.fromkeys((".htm", ".html", ".xhtml"), "html"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{f".{kind}": kind for kind in ("json", "csv", "tsv", "parquet", "arrow", "pdf", "zip", "tar")},
    **{".epub": "zip", ".whl": "zip", ".tgz": ".gz", ".caption": "text"},
    **{kind: kind for kind in COMPRESSED_MAGIC},
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"), "image"),
    **dict.fromkeys((".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au"), "audio"),
}
_OFFICE = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp", ".doc", ".xls", ".ppt", ".rtf")
_HTML = re.compile(rb"\s*+(?:<!--(?>.*?-->)\s*+)*+<(?:!doctype\s+html|html[\s>])", re.IGNORECASE | re.DOTALL)


def kind_of(name: str, head: bytes) -> str:
    """What a file called `name` that begins with `head` is.

    Returns:
        text, html, markdown, jsonl, json, csv, tsv, parquet, arrow, pdf, image, audio, zip, tar, office (of an office
        program, which nothing here reads), or the suffix of a compressed file (.gz, .zst, .bz2, .xz); "" where it is
        none of these.

    Example:
        >>> kind_of("a.dat", b"%PDF-1.7"), kind_of("notes.txt", b"plain"), kind_of("server.key", b"-----BEGIN")
        ('pdf', 'text', '')
    """
    suffix = PurePath(name).suffix.lower()
    if suffix in _OFFICE and not _HTML.match(head):
        return "office"
    for kind, at, magic in _MAGIC:
        if head.startswith(magic, at) and (at != 8 or head[:4] in (b"RIFF", b"FORM")):
            return kind
    if re.match(rb"BZh[1-9]1AY&SY", head):
        return ".bz2"
    if b"%PDF-" in head[:1024]:
        return "pdf"
    known = _SUFFIXES.get(suffix) or ("text" if not suffix or suffix in TEXT_SUFFIXES.split() else "")
    if known in ("", "text") and _HTML.match(head):
        return "html"
    return known


@cache
def media_suffixes() -> tuple[str, ...]:
    """Suffixes of images and sounds, which a text file of the same name may describe."""
    return tuple(suffix for suffix, kind in _SUFFIXES.items() if kind in ("image", "audio"))

"""Any file as records: what it is decides its reader, archives are entered, and nothing wrong with it raises."""

import stat
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from tilewright.core.errors import is_of_machine
from tilewright.data.common.records import EMPTY, NOTHING, Record, Rejected
from tilewright.data.readers.file_entry import Entry, Span, need_package
from tilewright.data.readers.file_kinds import HEAD_BYTES, kind_of
from tilewright.data.readers.limits import ReadLimits, ReadOptions
from tilewright.data.readers.media.audio import read_audio
from tilewright.data.readers.media.captions import described_file
from tilewright.data.readers.media.images import read_image
from tilewright.data.readers.temporary_files import temporary_error
from tilewright.data.readers.text.parsed_documents import read_book, read_html, read_notebook, read_pdf, read_word
from tilewright.data.readers.text.plain_text import read_markdown, read_text
from tilewright.data.readers.text.text_rows import read_rows
from tilewright.data.readers.unpack import unpack_compressed, unpack_tar, unpack_zip
from tilewright.data.readers.web_archive import unpack_warc

_MAX_CHARS = 4096
"""From more than this nothing is learned about a text in one language."""


@lru_cache(maxsize=1)
def _identifier() -> Any:
    """The identifier of a language for files that are opened; loading its model takes half a second."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def find_language(text: str) -> tuple[str, float]:
    """Find the language of an opened file's `text` as ISO 639-1 code, and its probability. Needs the package py3langid.

    Example:
        >>> find_language("Alle Menschen sind frei und gleich an Würde und Rechten geboren.")[0]
        'de'
    """
    language, probability = _identifier().classify(text[:_MAX_CHARS])
    return str(language), float(probability)


_READERS = {
    **{"text": read_text, "markdown": read_markdown, "html": read_html, "pdf": read_pdf},
    **{"notebook": read_notebook, "docx": read_word, "epub": read_book},
    **{"image": read_image, "audio": read_audio},
}
LINES = ("text", "markdown", "jsonl")
"""Kinds of files whose lines stand for themselves: a large one can be read in spans."""
_ROWS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow")
UNREADABLE = "cannot be read"
"""Rule of a file that is there and cannot be read: not for what is in it."""
_LIMITS, _OPTIONS = ReadLimits(), ReadOptions()

Items = Iterator[Record | Rejected]


def read_file(
    path: Path,
    name: str,
    domain: str,
    limits: ReadLimits = _LIMITS,
    options: ReadOptions = _OPTIONS,
    span: Span | None = None,
) -> Items:
    """Open one file of any kind: its records and rejects.

    Args:
        path: of the file.
        name: of it in records, relative to the source's root and printable.
        domain: of its records.
        limits: what a file may cost.
        options: the field of rows with the text; pixels, log-mel frames and languages on request.
        span: of a file of one of the kinds `LINES`, the lines that begin in these bytes; None: the whole file.

    Raises:
        TilewrightError: temporary files cannot be written, or a package is not installed. Bad data does not raise.
        OSError, MemoryError: no file can be opened any more, or there is no memory.
    """
    entry = Entry(Path(path), name, domain, limits, options, PurePosixPath(path).name, span=span)
    found = _read(entry)
    yield from _with_language(found, name) if options.language else found


def _read(entry: Entry) -> Items:
    try:
        status = entry.path.stat()
        if not stat.S_ISREG(status.st_mode):
            yield entry.reject("not a regular file", stat.filemode(status.st_mode)[0], "-")
        elif not status.st_size:
            yield entry.reject(EMPTY, 0.0, 1.0)
        else:
            found = 0
            for found, item in enumerate(_of_kind(entry, status.st_size), 1):  # noqa: B007
                yield item
            if (
                not found and entry.span is None
            ):  # an archive without members, a PDF without pages, a table without rows
                yield entry.reject(NOTHING, 0.0, 1.0, num_bytes=status.st_size)
    except OSError as error:
        if entry.depth:  # its file is a temporary one
            raise temporary_error(error) from error
        if is_of_machine(error):
            raise
        yield entry.reject(UNREADABLE, error.strerror or str(error))


def _of_kind(entry: Entry, size: int) -> Items:
    with entry.path.open("rb") as file:
        kind = kind_of(entry.inner, file.read(HEAD_BYTES), entry.options.suffixes)
    # 1. What is not read, with the reason.
    if not kind:
        suffix = PurePosixPath(entry.inner).suffix.lower()[:12]
        yield entry.reject("file type is not read", suffix or "none", "text, rows, image, audio", num_bytes=size)
    elif kind == "office":
        suffix = PurePosixPath(entry.inner).suffix.lower()
        yield entry.reject("office document is not read", suffix, "saved as PDF, HTML or CSV", num_bytes=size)
    elif kind in ("text", "json", "jsonl", "csv", "tsv") and (
        media := described_file(entry.path, entry.limits.document_bytes)
    ):
        shown = media if not entry.part else "the file of that name"
        yield entry.reject("text of another file", shown, "", num_bytes=size)
    # 2. What is read as it is.
    elif kind in _READERS:
        yield from _READERS[kind](entry)
    elif kind in _ROWS:
        yield from read_rows(entry, kind)
    # 3. Archives: each member is a file again, one level deeper.
    elif entry.depth >= entry.limits.depth:
        depth, most = float(entry.depth + 1), entry.limits.depth
        yield entry.reject("depth of archives", depth, most, num_bytes=size)
    else:
        unpack = {"zip": unpack_zip, "tar": unpack_tar, "warc": unpack_warc}.get(kind) or partial(
            unpack_compressed, kind=kind
        )
        for group in unpack(entry):
            if isinstance(group, Rejected):
                yield group
            else:
                for member in group:
                    yield from _read(member)


def _with_language(items: Items, name: str) -> Items:
    """Records of text of an opened file with their language, and its probability as a score."""
    need_package("py3langid", f"language of texts in {name}")
    for item in items:
        if isinstance(item, Rejected) or not item.text:
            yield item
        else:
            language, probability = find_language(item.text)
            yield replace(item, language=language, scores={**item.scores, "language": probability})

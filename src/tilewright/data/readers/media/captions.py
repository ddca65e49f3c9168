"""The text that belongs to an image or a sound: in a file of the same name, or in a table of file names.

`x.png` or `x.wav` has its text in `x.txt`, `x.caption` or `x.json`; or in a row of a table (.csv, .tsv, .jsonl) beside
it or one folder up that is called metadata, captions, transcripts, manifest or validated, as Hugging Face, NeMo and
Common Voice write them.
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tilewright.core.errors import is_of_machine
from tilewright.data.readers.file_kinds import media_suffixes
from tilewright.data.readers.text.decode_text import decode_text, wide_encoding_of
from tilewright.data.sources.find_files import stat_key

_TEXTS = ("caption", "transcript", "transcription", "sentence", "text", "description", "title")
_ALTS = ("alt", "alt_text", "alttext")
_FILES = ("file_name", "filename", "file", "path", "image", "audio", "audio_filepath")
TABLES = ("metadata", "captions", "transcripts", "manifest", "validated")
"""Names of tables of captions, without suffix."""
_SIDE = (".txt", ".caption", ".json")
_MAX_BYTES = 64 << 20
"""Of a table: it is in memory while its files are read."""


@dataclass(frozen=True)
class Caption:
    """Text and alternative text of an image or sound, and the name of the file that says them."""

    text: str = ""
    alt: str = ""
    source: str = ""


def caption_of(path: Path, longest: int, folders: int) -> Caption:
    """The captions of an image or sound from the files beside it, or from tables in as many folders upwards as
    `folders`.

    Files of more than `longest` bytes are not read.
    """
    text, alt, sources = "", "", []
    for suffix in _SIDE:
        found = _side_file(path.with_suffix(suffix), longest)
        if found is not None:
            text, alt = text or found.text, alt or found.alt
            sources.append(suffix)
    if sources:
        return Caption(text, alt, " ".join(sources))
    for folder in (path.parent, path.parent.parent)[:folders]:
        for table in _tables(folder):
            found = _table(str(table), *_version(table)).get(path.relative_to(folder).as_posix())
            if found is not None:
                return Caption(found[0], found[1], table.name)
    return Caption()


def caption_files(path: Path) -> list[Path]:
    """All files that may hold the caption of the image or sound at `path`."""
    beside = [side for suffix in _SIDE if _is_file(side := path.with_suffix(suffix))]
    return beside + [table for folder in (path.parent, path.parent.parent) for table in _tables(folder)]


def described_file(path: Path, longest: int) -> str:
    """The name of the image or sound that the file of captions at `path` describes, of one of them if it is a table;
    else ""."""
    if path.suffix in _SIDE:
        stem = os.path.splitext(path)[0]
        media = next((s for s in media_suffixes() if os.path.isfile(stem + s)), "")
        if media and _side_file(path, longest) is not None:
            return path.with_suffix(media).name
    if path.stem in TABLES and path in _tables(path.parent):
        rows = _table(str(path), *_version(path))
        return next((name for name in list(rows)[:100] if _is_file(path.parent / name)), "")
    return ""


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _side_file(path: Path, longest: int) -> Caption | None:
    try:
        if not path.is_file() or path.stat().st_size > longest:
            return None
        data = path.read_bytes()
    except OSError as error:
        if is_of_machine(error):
            raise
        return None
    text = _decoded(data)
    if path.suffix != ".json":
        return Caption(text.strip()) if text.strip() else None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    found = Caption(_first(value, _TEXTS), _first(value, _ALTS))
    return found if found.text or found.alt else None


def _decoded(data: bytes) -> str:
    wide = wide_encoding_of(data[:4096])
    return data.decode(wide, "replace") if wide else decode_text(data.removeprefix(b"\xef\xbb\xbf")).text


def _first(row: Mapping[str, object], names: tuple[str, ...]) -> str:
    """The first caption among the fields `names`, without half surrogate pairs, which cannot be written."""
    found = next((value for name in names if isinstance(value := row.get(name), str) and value.strip()), "")
    return found.strip().encode("utf-8", "replace").decode()


def _tables(folder: Path) -> list[Path]:
    every = (folder / f"{name}{suffix}" for name in TABLES for suffix in (".jsonl", ".csv", ".tsv"))
    return [path for path in every if _is_file(path)]


def _version(path: Path) -> tuple[int, str]:
    try:
        status = path.stat()
    except OSError:
        return 0, ""
    return status.st_size, stat_key(status)


@lru_cache(maxsize=4)
def _table(path: str, size: int, _version: str) -> dict[str, tuple[str, str]]:
    """Read a table of captions: file name -> (text, alt); empty if it is none. It is kept because each file of a folder
    asks for it."""
    if size > _MAX_BYTES:
        return {}
    try:
        rows = list(_rows(Path(path)))
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        if is_of_machine(error):
            raise
        return {}
    found = {}
    for row in rows:
        name = _first(row, _FILES)
        if name:
            found[name] = (_first(row, _TEXTS), _first(row, _ALTS))
    return found if any(any(texts) for texts in found.values()) else {}


def _rows(path: Path) -> Iterator[dict[str, object]]:
    text = _decoded(path.read_bytes())
    if path.suffix == ".jsonl":
        for line in text.split("\n"):
            value = json.loads(line) if line.strip() else None
            if isinstance(value, dict):
                yield value
        return
    yield from csv.DictReader(text.splitlines(), delimiter="," if path.suffix == ".csv" else "\t")  # type: ignore[misc]

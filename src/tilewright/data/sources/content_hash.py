"""Which content a file has: a hash of all its bytes, and whether they are UTF-8.

Names, sizes and modification times do not say which content a file has: a copy may have those of another file. The
hash is remembered for as long as size, times, inode and device of the file stay the same, so that a build that runs
again reads no file for it. A file that was written less than two seconds before it was read is not remembered: a
file system may give its next change the same times.
"""

import codecs
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from tilewright.core.atomic_io import write_whole
from tilewright.data.sources.find_files import stat_key

CONTENTS = "contents.json"
_CHUNK_BYTES = 1 << 22
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class FileContent:
    """The content of a file: XXH3-128 of its bytes, and whether all of them are UTF-8."""

    digest: str
    is_utf8: bool


def read_content(path: Path) -> FileContent:
    """Read a file's content to the hash of its bytes, and find if all are UTF-8.

    Raises:
        OSError: the file cannot be read.
    """
    digest, decoder, is_utf8 = xxhash.xxh3_128(), codecs.getincrementaldecoder("utf-8")(), True
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            is_utf8 = is_utf8 and _decodes(decoder, chunk)
    return FileContent(digest.hexdigest(), is_utf8 and _decodes(decoder, b"", final=True))


def _decodes(decoder: codecs.IncrementalDecoder, data: bytes, *, final: bool = False) -> bool:
    try:
        decoder.decode(data, final)
    except UnicodeDecodeError:
        return False
    return True


class Contents:
    """Hashes of the contents of files, remembered in a file between builds.

    Args:
        path: of the file; None remembers nothing.

    Example:
        >>> Contents().of(Path(__file__), os.stat(__file__)).is_utf8
        True
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self._known, self._asked = _load(path), dict[str, tuple[str, FileContent, bool]]()

    def of(self, path: Path, status: os.stat_result) -> FileContent:
        """The content hash of a file with this status.

        Raises:
            OSError: the file cannot be read.
        """
        name, key = str(path), stat_key(status)
        known = self._asked.get(name) or self._known.get(name)
        if known is not None and known[0] == key:
            content, settled = known[1], known[2]
        else:
            settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS
            content = read_content(path)
        self._asked[name] = key, content, settled
        return content

    def save(self) -> None:
        """Remember the content hashes that were asked for.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        if self._path is None:
            return
        rows = {name: [key, asdict(content)] for name, (key, content, settled) in self._asked.items() if settled}
        text = json.dumps(rows, sort_keys=True)
        if not self._path.exists() or self._path.read_text(encoding="utf-8") != text:
            write_whole(self._path, text)


def _load(path: Path | None) -> dict[str, tuple[str, FileContent, bool]]:
    """Load the content hashes from the file; nothing where it is missing or damaged, which costs time and no result."""
    try:
        rows = json.loads(path.read_bytes()) if path is not None else {}
        return {name: (str(key), FileContent(**content), True) for name, (key, content) in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

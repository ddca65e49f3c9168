"""Reads the new rows of a .jsonl file that another process is writing, each byte once.

A line counts when its line feed has arrived, so a half-written one waits. A file that was truncated, replaced or
removed is read again from its start; `read` reports that, and the rows of before are void.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 8 << 20
"""Longest line; a longer one counts as unreadable, so that a file without line feeds takes no memory."""
_CHECKED_BYTES = 256
"""Bytes before the reading position that are compared at each read: a file that was rewritten in place has others."""

Row = dict[str, Any]


@dataclass
class NewRows:
    """Result of one `read`. `restarted`: rows of earlier reads are void. `bad`: lines that are not JSON objects."""

    rows: list[Row] = field(default_factory=list)
    restarted: bool = False
    bad: int = 0


class JsonTail:
    """A growing .jsonl file, read further with every call.

    Args:
        path: of the file; it may be missing now, and come or go later.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def read(self) -> NewRows:
        """Read the tail of a .jsonl file: the rows written since the last call.

        Raises:
            OSError: the file is there and cannot be read; that it is missing is no error.
        """
        found = NewRows()
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed below)
        except (FileNotFoundError, NotADirectoryError):
            found.restarted = self._offset > 0
            self._forget()
            return found
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if self._offset and (identity != self._identity or not self._continues(file.fileno(), status.st_size)):
                found.restarted = True
                self._forget()
            self._identity = identity
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._take(chunk, found)
        return found

    def _forget(self) -> None:
        self._identity = (0, 0)
        self._offset = 0
        self._before = b""
        self._line = bytearray()
        self._too_long = False

    def _continues(self, descriptor: int, size: int) -> bool:
        """True where the tail continues: the bytes before the reading position are still those that were read."""
        if size < self._offset:
            return False
        start = self._offset - len(self._before)
        return os.pread(descriptor, len(self._before), start) == self._before

    def _take(self, chunk: bytes, found: NewRows) -> None:
        self._offset += len(chunk)
        self._before = (self._before + chunk)[-_CHECKED_BYTES:]
        first, *others = chunk.split(b"\n")
        self._extend(first)
        for part in others:
            self._finish(found)
            self._extend(part)

    def _extend(self, part: bytes) -> None:
        self._too_long = self._too_long or len(self._line) + len(part) > MAX_LINE_BYTES
        if self._too_long:
            self._line.clear()
        else:
            self._line += part

    def _finish(self, found: NewRows) -> None:
        row = None if self._too_long else parse(bytes(self._line))
        if row is not None:
            found.rows.append(row)
        elif self._too_long or self._line.strip():
            found.bad += 1
        self._line.clear()
        self._too_long = False


def parse(line: bytes) -> Row | None:
    """The JSON object in a line of a .jsonl file; None where there is none.

    Example:
        >>> parse(b'{"step": 3}'), parse(b'{"step": '), parse(b"3")
        ({'step': 3}, None, None)
    """
    try:
        row = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):  # brackets nested by the thousand
        return None
    return row if isinstance(row, dict) else None

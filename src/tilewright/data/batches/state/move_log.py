"""The log of a stream: what its samples are a function of, as far back as the run goes. Append-only, `mixture.jsonl`.

    {"kind": "stage", "start": 0, "weights": {"code": 0.7, ...}, "before": {"code": 0, ...}, "step": 0, "why": ""}
    {"kind": "size", "step": 0, "sample": 0, "size": 16}
    {"kind": "skip", "samples": [5120, 5376], "step": 40, "why": ""}

Each line is hashed with the hash of the lines before it, so number and hash of the last line name the whole log: a
checkpoint has these two and not the lines. Lines behind those of a checkpoint are of steps that were lost; a resume
cuts them, but for what a user has asked to skip.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tilewright.core.atomic_io import write_whole
from tilewright.core.errors import DataError
from tilewright.core.json_text import from_json

FILE = "mixture.jsonl"
"""Of the run folder."""
Row = dict[str, Any]
Mark = tuple[int, str]
"""Number of lines, and the hash of them all."""


def chained(lines: Iterable[bytes], mark: Mark = (0, "")) -> Mark:
    """The mark (a chained hash) behind some lines of a stream's log.

    Example:
        >>> chained([b"a", b"b"]) == chained([b"b"], chained([b"a"])), chained([b"b", b"a"]) == chained([b"a", b"b"])
        (True, False)
    """
    number, digest = mark
    for line in lines:
        number, digest = number + 1, xxhash.xxh3_128_hexdigest(digest.encode() + line)
    return number, digest


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row of a stream's log as the JSON line that is written, without the end of the line."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


class MoveLog:
    """The append-only log of a data stream, in memory until a file keeps it."""

    def __init__(self) -> None:
        self.mark: Mark = (0, "")
        """Of the lines that count."""
        self._base: Mark = (0, "")  # lines before it are nowhere, or in the file
        self._lines: list[bytes] = []  # behind it
        self._path: Path | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row (a move of weights, say) to the log of the stream.

        Raises:
            DataError: the file cannot be written.
        """
        line = line_of(row)
        if self._path is not None:
            _write(self._path, line)
        else:
            self._lines.append(line)
        self.mark = chained([line], self.mark)

    def begin(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begin the log of the stream with these rows, whatever was before."""
        self._take((0, ""), [line_of(row) for row in rows])

    def go_to(self, mark: Mark) -> None:
        """Go back to a mark of the stream's log, or on with another one, whose rows are unknown until `keep_in` finds
        them."""
        if mark == self.mark:
            return
        lines, base = (self._lines, self._base) if self._path is None else (_lines(self._path), (0, ""))
        kept = lines[: max(0, mark[0] - base[0])]
        if chained(kept, base) == mark:
            self._take(base, kept)
        else:
            self._path = None
            self._take(mark, [])

    def keep_in(self, path: Path) -> tuple[list[Row], str | None]:
        """Have the rows of the stream's log in this file from now on.

        Args:
            path: of a log that goes on at this one's mark, or of none. Another log there is renamed, not overwritten.

        Returns:
            Rows behind the mark, which are cut; of a log that is lost what it asks to skip. Why it is lost, or None.
        """
        there, number = _lines(path), self._base[0]
        if chained(there[:number]) == self._base:
            self._path = path
            self._take((0, ""), there[:number] + self._lines)
            return [row for row in map(_row, there[number:]) if row is not None], None
        asked = [row for row in map(_row, there) if row is not None and row["kind"] == "skip"]
        aside = _set_aside(path)
        self._path = path
        return asked, f"is not the log of this checkpoint, and is now {aside}" if aside else "is not there"

    def _take(self, base: Mark, lines: list[bytes]) -> None:
        """Take these lines and no others into the stream's log."""
        self._base, self._lines, self.mark = base, lines, chained(lines, base)
        if self._path is None:
            return
        self._lines, content = [], b"".join(line + b"\n" for line in lines)
        try:
            if not self._path.exists() or self._path.read_bytes() != content:  # also half a line at its end
                write_whole(self._path, content.decode())
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def read_in(self, path: Path, mark: Mark | None) -> list[Row]:
        """The rows of a stream's log that another process may be writing, those behind the mark too.

        Args:
            path: of the log.
            mark: of a checkpoint; None: there is none yet.

        Raises:
            DataError: it is not the log of this checkpoint, or a line is no row.
        """
        lines = _lines(path)
        if mark is not None and chained(lines[: mark[0]]) != mark:
            raise other_log(path, len(lines), mark)
        rows = [_row(line) for line in lines]
        bad = next((number for number, row in enumerate(rows, 1) if row is None), None)
        if bad is not None:
            raise unreadable(path, f"line {bad} is no row of a log")
        return [row for row in rows if row is not None]

    @staticmethod
    def ask(path: Path, row: Mapping[str, Any]) -> None:
        """Ask for a move in a stream's log: add a row to the log of a run that is not running, for the run that
        continues it.

        Raises:
            DataError: the file cannot be written.
        """
        content = b"".join(line + b"\n" for line in [*_lines(path), line_of(row)])
        try:
            write_whole(path, content.decode())
        except OSError as error:
            raise _cannot_write(path, error) from error

    def rows(self) -> list[Row]:
        """All rows of the stream's log.

        Raises:
            DataError: they are not at hand, or the file was changed.
        """
        if self._path is not None:
            return self.read_in(self._path, self.mark)[: self.mark[0]]
        if self._base[0]:
            raise unreadable(Path(FILE), f"none of the first {self._base[0]} rows of this checkpoint's log")
        return [json.loads(line) for line in self._lines]


def _lines(path: Path) -> list[bytes]:
    """Whole lines of a stream's log file; none where it is not there."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, str(error)) from error


def _row(line: bytes) -> Row | None:
    try:
        row = from_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("kind"), str) else None


def _write(path: Path, line: bytes) -> None:
    left = memoryview(line + b"\n")
    try:
        with open(path, "ab", buffering=0) as file:
            while left:  # a disk that fills takes part of a line
                left = left[file.write(left) :]
    except OSError as error:
        raise _cannot_write(path, error) from error


def _set_aside(path: Path) -> str | None:
    """Set a stream's log file aside: its new name, None where there was none."""
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    os.replace(path, target)
    return target.name


def other_log(path: Path, found: int, mark: Mark) -> DataError:
    """The error of a stream's log of moves whose hash is not that of the checkpoint."""
    return DataError(
        "The log of the mixture is not the one of this checkpoint",
        got=f"{found} lines, whose first {mark[0]} have another hash",
        need=f"the {mark[0]} lines that the run wrote before its newest checkpoint",
        try_="put the run's own mixture.jsonl back. Training continues without it, from the checkpoint's own weights",
        where=str(path),
    )


def unreadable(path: Path, got: str) -> DataError:
    """The error of a stream's log file that cannot be used."""
    return DataError(
        "The log of the mixture cannot be read",
        got=got,
        need="mixture.jsonl of the run folder, as train wrote it",
        try_="put the run's own mixture.jsonl back. Training continues without it, from the checkpoint's own weights",
        where=str(path),
    )


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(
        "The log of the mixture cannot be written",
        got=str(error),
        need="room on the disk, and the right to write in the folder",
        try_="free disk space and run the same command: it continues from the newest checkpoint",
        where=str(path),
    )

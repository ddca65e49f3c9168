"""Shards that were fetched, in a folder that several processes share, under a limit of bytes.

A file is named by its content's hash, written whole or not at all, and checked when a process opens it. Who uses a
shard holds a shared lock on its file, which goes with the process; where room is needed, the files go that were not
used for longest and that no process holds. The folder is the cache's own: nothing that it did not fetch is ever
removed, and a process whose source is away holds all that is left of it. POSIX only (flock).
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tilewright.core.atomic_io import hash_file
from tilewright.core.log import get_logger

log = get_logger(__name__)

_SUFFIX, _PART, _LOCK = ".shard", ".part", "lock"


class ShardCache:
    """Cache of fetched shards in a folder, under a limit of bytes, which several processes share.

    Args:
        folder: made where it is missing.
        limit: bytes of all files in it.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._held: dict[str, IO[bytes]] = {}
        self._said_full = False

    def hold(self, digest: str) -> Path | None:
        """Hold a shard in the cache: its file, which stays until `release`; None where it is not there, or was damaged
        and is gone."""
        path = self.folder / f"{digest}{_SUFFIX}"
        if digest in self._held:
            return path
        try:
            file = path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        fcntl.flock(file, fcntl.LOCK_SH)
        if not _is_at(file, path):  # removed between the two
            file.close()
            return None
        if hash_file(path) != digest:
            log.warning("cached shard %s has changed, and is fetched again", path)
            path.unlink(missing_ok=True)
            file.close()
            return None
        os.utime(path)
        self._held[digest] = file
        return path

    def put(self, digest: str, content: bytes) -> Path | None:
        """Keep a fetched shard in the cache, and hold it. None where it has no room or cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                if (path := self.hold(digest)) is not None:
                    return path
                if not self._make_room(len(content)):
                    return None
                part = self.folder / f"{digest}{_PART}"
                part.write_bytes(content)
                part.rename(self.folder / f"{digest}{_SUFFIX}")
                return self.hold(digest)
        except OSError as error:
            self._say_full(error)
            return None

    def _say_full(self, error: OSError) -> None:
        if not self._said_full:
            log.warning("cache of shards %s cannot be written (%s): shards stay in memory", self.folder, error)
        self._said_full = True

    def release(self, digest: str) -> None:
        """Release a shard of the cache; it stays while there is room, and longer than those released before."""
        if (file := self._held.pop(digest, None)) is not None:
            os.utime(file.fileno())
            file.close()

    def close(self) -> None:
        """Close the cache of shards: release all of them."""
        for digest in list(self._held):
            self.release(digest)

    @contextlib.contextmanager
    def fetching(self, digest: str) -> Iterator[None]:
        """While one process fetches a shard into the cache, others wait, and find it."""
        path = self.folder / f"{digest}.{_LOCK}"
        with contextlib.ExitStack() as files:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = files.enter_context(path.open("w"))
            except OSError as error:  # no place for a shard either
                self._say_full(error)
                yield
                return
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # who waits for the removed one fetches, at worst, once more

    def _make_room(self, size: int) -> bool:
        """Make room in the cache of shards: remove what no process uses, longest first, until so many bytes fit."""
        for left in self.folder.glob(f"*{_PART}"):  # of a process that was killed: only who has the lock writes
            left.unlink()
        found = sorted((path.stat().st_mtime_ns, path) for path in self.folder.glob(f"*{_SUFFIX}"))
        used = sum(path.stat().st_size for _, path in found)
        for _, path in found:
            if used + size <= self.limit:
                break
            if (freed := _removed(path)) is not None:
                used -= freed
        return used + size <= self.limit

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _removed(path: Path) -> int | None:
    """Bytes of a cached shard's file that is now removed; None where a process holds it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        size = os.fstat(file.fileno()).st_size
        path.unlink()
        return size


def _is_at(file: IO[bytes], path: Path) -> bool:
    """True if an open file of a cached shard is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False

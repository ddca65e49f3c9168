"""Cache entries: folders that are either whole and checked, or not there.

An entry is built in a folder of another name and renamed when it is complete, with a manifest of its files. One process
builds while others that want the same entry wait. A corrupt or changed entry is said, removed and built again.
POSIX only (flock).
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tilewright.core.atomic_io import hash_file
from tilewright.core.errors import DataError, TilewrightError, is_of_machine, machine_error
from tilewright.core.log import get_logger
from tilewright.core.units import format_bytes

log = get_logger(__name__)

_MANIFEST = "manifest.json"
_CHECKED_BYTES = 1 << 30  # files above this are checked by size alone


def cached(root: Path, key: str, build: Callable[[Path], None], before: Callable[[], None] | None = None) -> Path:
    """The folder of cache entry `key` below `root`, built by `build(folder)` where it is missing or damaged.

    Args:
        root: folder of the cache.
        key: name of the entry.
        build: fills the folder it gets.
        before: called first where the entry is missing or damaged; may have another process make it.

    Raises:
        DataError: the cache folder cannot be written, or the disk is full. Nothing half-written stays.
        HardwareError: too many open files, or no memory.
    """
    entry = root / key
    if damage(entry) is None:  # no lock needed: a whole entry never changes, and the folder may be read-only
        return entry
    if before:
        before()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            problem = damage(entry)
            if problem is None:
                return entry
            if entry.exists():
                log.warning("cached data %s is damaged (%s) and is made again", entry, problem)
                shutil.rmtree(entry)
            _build(root, key, build)
    except (OSError, MemoryError) as error:
        raise _cannot_write(root, error) from error
    return entry


def damage(entry: Path) -> str | None:
    """The damage of a cache entry, or None."""
    try:
        files = json.loads((entry / _MANIFEST).read_bytes())
        for name, (size, digest) in files.items():
            path = entry / name
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if size <= _CHECKED_BYTES and hash_file(path) != digest:
                return f"{name} has changed"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{_MANIFEST} cannot be read"
    return None


def _build(root: Path, key: str, build: Callable[[Path], None]) -> None:
    for left in root.glob(f"{key}.part-*"):  # of a process that was killed; the lock is ours, so no process writes it
        shutil.rmtree(left)
    part = root / f"{key}.part-{os.getpid()}"
    part.mkdir()
    try:
        build(part)
        files = {p.relative_to(part).as_posix(): p for p in sorted(part.rglob("*")) if p.is_file()}
        manifest = {name: (path.stat().st_size, hash_file(path)) for name, path in files.items()}
        (part / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        part.rename(root / key)
    finally:
        if part.exists():
            shutil.rmtree(part)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file, or the death of the process, releases the lock


def _cannot_write(root: Path, error: OSError | MemoryError) -> TilewrightError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if not isinstance(error, OSError) or (is_of_machine(error) and not full):
        return machine_error(error, str(root))
    got = str(error)
    if full:
        got = f"{error.strerror}, {format_bytes(shutil.disk_usage(root).free)} free"
    return DataError(
        "Prepared data cannot be written",
        where=str(root),
        got=got,
        need="a folder that can be written, with room for about twice the text",
        try_="data.cache_dir = another folder" + (", or a smaller data.max_bytes" if full else ""),
    )

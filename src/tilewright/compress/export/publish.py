"""An artefact that is whole or not there: written beside its name, synced, hashed, renamed.

Works for targets that are a file and for those that are a folder.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import xxhash

from tilewright.core.atomic_io import fsync_path, hash_file
from tilewright.core.errors import CheckpointError

T = TypeVar("T")
_PARTIAL = ".partial"


def publish(path: Path, write: Callable[[Path], T]) -> T:
    """Publish an artefact: let `write` make it, and give it its name when it is whole; one that is there is replaced.

    Args:
        path: file or folder; its parent is made.
        write: gets a path that does not exist.

    Raises:
        CheckpointError: it cannot be written; what was at `path` is still there.
    """
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        result = write(partial)
        for file in _files(partial):
            fsync_path(file)
        if partial.is_dir() and path.exists():  # a folder cannot be renamed onto one
            old = path.with_name(f".{path.name}.old{_PARTIAL}")
            remove(old)
            os.rename(path, old)
            os.rename(partial, path)
            remove(old)
        else:
            if path.is_dir():
                remove(path)
            os.replace(partial, path)
        fsync_path(path.parent)
    except OSError as error:
        raise CheckpointError(
            "Export cannot be written",
            got=str(error),
            need="space in a writable folder",
            try_="free space, or another --out; nothing is half-written",
            where=str(path),
        ) from error
    finally:
        remove(partial)
    return result


def remove(path: Path) -> None:
    """Delete a file or a folder of an artefact before publishing, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_symlink() or path.exists():
        path.unlink()


def artefact_bytes(path: Path) -> int:
    """The bytes of a published artefact, a file or all files of a folder."""
    return sum(file.stat().st_size for file in _files(path))


def artefact_hash(path: Path) -> str:
    """The XXH3-128 hash of a published artefact; for a folder, of its files' names and hashes."""
    if path.is_file():
        return hash_file(path)
    lines = [f"{file.relative_to(path).as_posix()} {hash_file(file)}\n" for file in _files(path)]
    return xxhash.xxh3_128("".join(lines).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())

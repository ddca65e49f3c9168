"""Files and folders that are whole or not there: fsync, rename, and a manifest of hashes.

`write_whole` replaces one file. A folder is made under another name, sealed with `write_manifest`, and renamed
by `publish_folder`; `check_manifest` says later whether it is still what was written. The hash (XXH3, 128 bit)
finds truncated and corrupt files; it is no protection against someone who means harm.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import xxhash

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


class FileEntry(TypedDict):
    """Entry of a file in a manifest."""

    bytes: int
    xxh3_128: str


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, onto the disk, as atomic writes need it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically: a crash leaves the old one or the new one.

    Raises:
        OSError: the disk is full or the folder cannot be written; the old file is still there.
    """
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    fsync_path(path.parent)


def hash_file(path: Path) -> str:
    """Hash a file by XXH3-128, in hexadecimal, read in 4 MiB pieces."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def file_entries(folder: Path, paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Size and hash of files of a folder by name: the entries of a manifest."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
        for path in sorted(paths)
    }


def write_entries(folder: Path, entries: Mapping[str, FileEntry]) -> int:
    """Write a folder's manifest for atomic IO; returns the bytes of its files together."""
    write_whole(folder / MANIFEST, json.dumps({"files": dict(sorted(entries.items()))}, indent=1))
    return sum(entry["bytes"] for entry in entries.values())


def write_manifest(folder: Path) -> int:
    """Write a manifest for atomic IO: record size and hash of every file in `folder`; returns their bytes together."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST]
    return write_entries(folder, file_entries(folder, paths))


def check_manifest(folder: Path) -> str | None:
    """Check a manifest of atomic IO: None where every file is there with the hash it was written with, else what is
    wrong first."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            path = folder / name
            if ".." in Path(name).parts or Path(name).is_absolute() or (path.exists() and not path.is_file()):
                return f"{MANIFEST} lists {name!r}, which is no file of the folder"
            size = path.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, {entry['bytes']} were written"
            if hash_file(path) != entry["xxh3_128"]:
                return f"{name} is not what was written (its hash differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is damaged ({error!r})"
    return None


def listed_files(folder: Path) -> set[str]:
    """Names of the files in a manifest of atomic IO that `check_manifest` has found right."""
    return set(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])


def remove_folder(path: Path) -> None:
    """Remove a folder with all in it, even if another process removes parts or all of it at the same time.

    Raises:
        OSError: it, or something in it, cannot be removed, or it is no folder.
    """
    while os.path.lexists(path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:  # something in it went away between listing and removal; the rest is still there
            continue


def publish_folder(partial: Path, final: Path) -> None:
    """Publish a folder atomically: give a finished one its name, after its files and entries are on the disk.

    Raises:
        OSError: the folder cannot be synced or renamed; nothing is at `final` then.
    """
    for path in partial.rglob("*"):
        fsync_path(path)
    fsync_path(partial)
    os.rename(partial, final)
    fsync_path(final.parent)

"""The files below a folder, each once. Links in it are followed once; links out of it, loops and what cannot be read
come out as rejects."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from tilewright.core.errors import is_of_machine, machine_error
from tilewright.data.common.records import Rejected, rejected
from tilewright.data.sources.source_parts import printable

OUTSIDE = "link out of the source"
"""Reason of a link that is not followed: its target lies outside of the source."""


@dataclass
class Found:
    """The content below a path: files to read as (name, path, status), rejects, and the size of each of both by name.

    A name is relative to the root, printable, and different for each entry.
    """

    files: list[tuple[str, Path, os.stat_result]] = field(default_factory=list)
    rejects: list[Rejected] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def refuse(self, name: str, reason: str, example: str = "", size: int = 0) -> None:
        self.sizes[name] = size
        self.rejects.append(rejected(name, reason, example, num_bytes=size))


def stat_key(status: os.stat_result) -> str:
    """When walking files, a key that changes with each write to a file, and with each other file that takes its
    place."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_dev}:{status.st_ino}"


def find_files(root: Path) -> Found:
    """Walk below `root` and find all files, in a fixed order. Real files and folders come before links to them.

    Raises:
        HardwareError: too many open files, or no memory.
    """
    found = Found()
    if not root.is_dir():
        _add(found, printable(root.name), root, set(), Path(os.path.realpath(root)))
        return found
    inside = _bounds(root)
    seen: set[str] = {os.path.realpath(root)}
    files: set[str] = set()
    links: list[tuple[str, Path]] = []
    todo = [("", root)]
    while todo or links:
        if not todo:
            prefix, path = links.pop(0)
            _follow(found, prefix, path, seen, files, todo, inside)
            continue
        prefix, folder = todo.pop()
        todo += reversed(_list(found, prefix, folder, seen, files, links, inside))
    return found


def _bounds(root: Path) -> Path:
    """The folder that links may lead into on a walk: the source, or all of a cached repository of the hub, whose
    snapshots are links into its `blobs`."""
    real = Path(os.path.realpath(root))
    cached = real.parent.parent
    return cached if real.parent.name == "snapshots" and (cached / "blobs").is_dir() else real


def _list(
    found: Found,
    prefix: str,
    folder: Path,
    seen: set[str],
    files: set[str],
    links: list[tuple[str, Path]],
    inside: Path,
) -> list[tuple[str, Path]]:
    """Add the files of `folder` to a walk and return its sub-folders. Links are put off until everything real is
    known."""
    try:
        with os.scandir(folder) as entries:
            names = sorted((e for e in entries), key=lambda e: os.fsencode(e.name))
    except OSError as error:
        _only_of_file(error, folder)
        found.refuse(prefix.rstrip("/") or ".", "cannot be read", str(error.strerror))
        return []
    folders = []
    for entry in names:
        name, path = prefix + printable(entry.name), Path(entry.path)
        if entry.name.startswith("."):
            found.refuse(name, "hidden file or folder")
        elif entry.is_symlink():
            links.append((name, path))
        elif entry.is_dir(follow_symlinks=False):
            seen.add(os.path.realpath(path))
            folders.append((name + "/", path))
        else:
            _add(found, name, path, files, inside)
    return folders


def _follow(
    found: Found,
    name: str,
    link: Path,
    seen: set[str],
    files: set[str],
    todo: list[tuple[str, Path]],
    inside: Path,
) -> None:
    real = os.path.realpath(link)
    if not os.path.isdir(real):
        _add(found, name, link, files, inside)
    elif real in seen:
        found.refuse(name, "link to a folder that is read already", printable(real))
    elif Path(os.path.realpath(link.parent)).is_relative_to(real):
        found.refuse(name, "link to a folder that it is in", printable(real))
    elif not Path(real).is_relative_to(inside):
        found.refuse(name, OUTSIDE, printable(real))
    else:
        seen.add(real)
        todo.append((name + "/", link))


def _add(found: Found, name: str, path: Path, files: set[str], inside: Path) -> None:
    real = os.path.realpath(path)
    try:
        status = path.stat()
    except OSError as error:
        _only_of_file(error, path)
        found.refuse(name, "cannot be read", str(error.strerror))
        return
    if real in files:
        found.refuse(name, "link to a file that is read already", printable(real))
        return
    if not Path(real).is_relative_to(inside):
        found.refuse(name, OUTSIDE, printable(real), status.st_size)
        return
    files.add(real)
    found.sizes[name] = status.st_size
    found.files.append((name, path, status))


def _only_of_file(error: OSError, path: Path) -> None:
    if is_of_machine(error):
        raise machine_error(error, str(path)) from error

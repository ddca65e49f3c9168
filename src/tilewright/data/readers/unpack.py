"""Compressed files, zip and tar, member by member, in temporary files within limits.

A member's own name is never used as a path. Members with the same name but for the suffix lie in one folder at the same
time, so that captions and transcripts are found beside images and sounds as they are on disk; members that share a name
must follow each other in a tar, as WebDataset has it.
"""

import math
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from tilewright.data.common.records import EMPTY, Rejected
from tilewright.data.readers.file_entry import Entry
from tilewright.data.readers.file_kinds import COMPRESSED_MAGIC
from tilewright.data.readers.parser_errors import PARSER_ERRORS, damage_of
from tilewright.data.readers.temporary_files import ScratchFile, ScratchFolder
from tilewright.data.sources.decompress import FREE_EXPANSION, decompressed
from tilewright.data.sources.source_parts import printable

_PIECE = 1 << 20
_HEADER_BYTES = 1 << 24
"""Most that a tar's header may be long: long names and extended headers."""
_SHORT_SUFFIX = 12

Group = list[Entry]
"""Members whose names differ in the suffix only."""


@dataclass
class UnpackBudget:
    """The bytes that an archive may still unpack to."""

    entry: Entry
    size: int
    given: int = 0
    members: int = 0

    def spend(self, num_bytes: int) -> Rejected | None:
        self.given += num_bytes
        limits = self.entry.limits
        if self.given > limits.unpacked_bytes:
            return self.entry.reject("unpacked bytes", float(self.given), limits.unpacked_bytes)
        if self.given > FREE_EXPANSION + limits.ratio * self.size:
            return self.entry.reject("compression ratio", self.given / max(1, self.size), limits.ratio)
        return None

    def another(self) -> Rejected | None:
        self.members += 1
        if self.members > self.entry.limits.members:
            return self.entry.reject("members of an archive", float(self.members), self.entry.limits.members)
        return None


def unpack_compressed(entry: Entry, kind: str) -> Iterator[Group | Rejected]:
    """Unpack the one file in a compressed file. What came before damage is kept, and a reject says that there was
    some."""
    budget, name = UnpackBudget(entry, entry.path.stat().st_size), PurePosixPath(entry.inner)
    inner = name.stem + (".tar" if name.suffix == ".tgz" else "")
    with ScratchFolder() as folder:
        target, problem = folder / f"member{_suffix(inner)}", None
        with ScratchFile(target) as out:
            for piece in decompressed(entry.name, entry.path, kind, math.inf):
                if isinstance(piece, Rejected):
                    problem = entry.reject(piece.rule, piece.value or "ends early", "a whole stream")
                    break
                problem = budget.spend(len(piece))
                if problem is not None:
                    break
                out.write(piece)
        if target.stat().st_size:
            yield [entry.member(target, inner, printable(inner))]
        elif problem is None:
            problem = entry.reject(EMPTY, 0.0, 1.0)
        if problem is not None:
            yield problem


def unpack_zip(entry: Entry) -> Iterator[Group | Rejected]:
    """Unpack a zip: yields the members in the order of their names."""
    size = entry.path.stat().st_size
    num = _zip_members(entry.path, size)
    if num > entry.limits.members:
        yield entry.reject("members of an archive", float(num), entry.limits.members, num_bytes=size)
        return
    try:
        archive = zipfile.ZipFile(entry.path)
    except PARSER_ERRORS as error:
        yield entry.reject("damaged zip", damage_of(error), num_bytes=size)
        return
    with archive:
        infos = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda info: info.filename)
        if any(info.filename == "[Content_Types].xml" for info in infos):
            yield entry.reject("office document, not an archive of files", "[Content_Types].xml", num_bytes=size)
            return

        def files() -> Iterator[tuple[str, Any]]:
            for info in infos:
                yield info.filename, (lambda info=info: archive.open(info)) if not info.flag_bits & 1 else "encrypted"

        yield from _members(entry, UnpackBudget(entry, size), files())


def _zip_members(path: Path, size: int) -> int:
    """Members of a zip to unpack, that the directory at its end lists, counted without holding them; 0 where there is
    none."""
    with path.open("rb") as file:
        file.seek(max(0, size - (1 << 16) - 22))
        tail = file.read()
        at = tail.rfind(b"PK\x05\x06")
        if at < 0:
            return 0
        end = size - len(tail) + at
        length = int.from_bytes(tail[at + 12 : at + 16], "little")
        start = 0 if length == 0xFFFFFFFF else max(0, end - length)
        file.seek(start)
        num, held = 0, b""
        while start < end and (piece := file.read(min(_PIECE, end - start))):
            start += len(piece)
            num += (held + piece).count(b"PK\x01\x02")
            held = piece[-3:]
        return num


def unpack_tar(entry: Entry) -> Iterator[Group | Rejected]:
    """Unpack a tar: yields the members in its order. Links and devices in it are no files."""
    size = entry.path.stat().st_size
    lost: list[Rejected] = []
    with entry.path.open("rb") as file:
        yield from _members(entry, UnpackBudget(entry, size), _tar_files(entry, _Bounded(file), lost))
    yield from lost


def _tar_files(entry: Entry, file: Any, lost: list[Rejected]) -> Iterator[tuple[str, Any]]:
    """Files of a tar to unpack: (name, how to open); what is no file, and damage, goes to `lost`."""
    last, others, example = -1, 0, ""
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                cast(Any, archive).members.clear()  # else it keeps all of them
                if member.offset <= last:
                    raise tarfile.ReadError("a member before its header")
                last = member.offset
                if member.isreg():
                    yield member.name, lambda member=member: archive.extractfile(member)
                elif not member.isdir():
                    others, example = others + 1, member.name
            end = archive.offset
        file.seek(end)
        rest = file.read(tarfile.BLOCKSIZE)
        if rest.strip(b"\0"):
            lost.append(entry.reject("damaged tar, the rest is lost", "no header", "a header or the end"))
        elif not rest:
            lost.append(entry.reject("truncated tar, members may be lost", "no end", "a block of zeros", count=0))
    except (tarfile.TarError, *PARSER_ERRORS) as error:
        lost.append(entry.reject("damaged tar, the rest is lost", damage_of(error)))
    if others:
        lost.append(entry.reject("link or device in an archive", printable(example[:99]), "a file", count=others))


class _Bounded:
    """A file that tarfile reads: a header that claims a huge or negative size is damage, and takes no memory."""

    def __init__(self, file: IO[bytes]):
        self._file = file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)

    def seek(self, at: int, whence: int = 0) -> int:
        return self._file.seek(at, whence)

    def tell(self) -> int:
        return self._file.tell()


def _members(entry: Entry, budget: UnpackBudget, files: Iterator[tuple[str, Any]]) -> Iterator[Group | Rejected]:
    """Unpacked groups of members that were written to a folder of their own, and the rejects of others."""
    group: Group = []
    folder, stem = _Folders(), ""
    try:
        for name, opened in files:
            problem = budget.another()
            if problem:
                yield problem
                break
            if opened == "encrypted":
                yield entry.reject("encrypted member", "a password", "none", part=printable(name[:300]))
                continue
            # Members of one name with other suffixes are a group: an image with its captions.
            suffix = _suffix(name)
            if group and (stem != _stem(name) or any(one.path.suffix == suffix for one in group)):
                yield group
                group = []
            if not group:
                folder.renew()
            stem = _stem(name)
            target = folder.path / f"member{suffix}"
            # A damaged member is refused alone; beyond the archive's budget nothing more is unpacked.
            stop, problem = _write(entry, budget, printable(name[:300]), target, opened)
            if problem:
                yield problem
            if stop:
                break
            if not problem:
                group.append(entry.member(target, PurePosixPath(name).name, printable(name[:300])))
        if group:
            yield group
    finally:
        folder.close()


def _write(entry: Entry, budget: UnpackBudget, shown: str, target: Path, opened: Any) -> tuple[bool, Rejected | None]:
    """Unpack a member to `target`; if the archive is left, and why the member is not there."""
    with ScratchFile(target) as out:
        try:
            source = opened()
        except PARSER_ERRORS as error:
            return False, entry.reject("damaged member", damage_of(error), part=shown)
        with source:
            while True:
                try:
                    piece = source.read(_PIECE)
                except (tarfile.TarError, *PARSER_ERRORS) as error:
                    return False, entry.reject("damaged member", damage_of(error), part=shown)
                if not piece:
                    return False, None
                problem = budget.spend(len(piece))
                if problem:
                    return True, problem
                out.write(piece)


class _Folders:
    """One temporary folder at a time."""

    def __init__(self) -> None:
        self._held: ScratchFolder | None = None

    @property
    def path(self) -> Path:
        assert self._held is not None
        return self._held.path

    def renew(self) -> None:
        self.close()
        self._held = ScratchFolder()

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _stem(name: str) -> str:
    return str(PurePosixPath(name).with_suffix("")) if PurePosixPath(name).name else name


def _suffix(name: str) -> str:
    """The suffix of an unpacked member's name where it can be one of a temporary file's."""
    suffix = PurePosixPath(name).suffix.lower()
    known = suffix[1:].isalnum() and suffix.isascii() and len(suffix) <= _SHORT_SUFFIX
    return suffix if known or suffix in COMPRESSED_MAGIC else ""

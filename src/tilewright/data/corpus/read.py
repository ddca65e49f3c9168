"""Reads a source into one spool file of cleaned, exactly deduplicated documents, within a byte limit.

The limit is shared so that small domains give everything and large ones share the rest equally. Within a domain parts
are read in the order of a seeded hash of their names: a sample of the whole, not its beginning. Deterministic.
"""

import errno
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tilewright.core.errors import DataError, is_of_machine, machine_error
from tilewright.data.common.progress import ProgressBar
from tilewright.data.common.records import BLANK, DUPLICATE, HALF_PAIR, LIMIT, NO_DOMAIN, Record, Rejected, rejected
from tilewright.data.dataset.account import Account, PartRecord
from tilewright.data.engine.build_settings import RepairSection
from tilewright.data.sources.path_purpose import Wanted, better_format
from tilewright.data.sources.source_parts import Part, Source, cut
from tilewright.data.stages.text.repair_text import repaired

_REPAIR = RepairSection(unicode="none")  # a run's text keeps its Unicode normal form
_DRAINED_BYTES = 4 << 20  # text that is read on where a limit ended the reading inside a part, to say how much it was
_SLACK = 0.003  # share of the limit that may stay unused: no further round of sharing for less


@dataclass
class Spool:
    """Spool of a source's documents: one file, one after the other, and where each one is.

    `names`, `domain_of` (index into `domains`), `offsets` and `lengths` (bytes) have one entry a document.
    """

    path: Path
    domains: tuple[str, ...] = ()
    names: list[str] = field(default_factory=list)
    domain_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    available_bytes: int = 0
    account: Account = field(default_factory=lambda: Account(Source("", "", ())))
    num_duplicates: int = 0
    records: list[PartRecord] = field(default_factory=list)
    """Of the part that each document is from."""

    @property
    def rejects(self) -> list[Rejected]:
        """Everything that was refused, summed by place and reason."""
        return self.account.rows()

    def __len__(self) -> int:
        return len(self.names)

    def data(self) -> np.ndarray:
        """All bytes of the spool, memory-mapped, uint8."""
        return np.asarray(np.memmap(self.path, np.uint8, "r"))

    def data_of(self, index: int) -> bytes:
        """The bytes of document `index` of the spool."""
        start = int(self.offsets[index])
        return bytes(self.data()[start : start + int(self.lengths[index])])

    def digest(self, index: int) -> bytes:
        """A hash of document `index` of the spool."""
        return xxhash.xxh3_128_digest(self.data_of(index))

    def text(self, data: np.ndarray, index: int) -> str:
        """Record `index` out of `data()`."""
        start = self.offsets[index]
        return bytes(data[start : start + self.lengths[index]]).decode("utf-8")


Convert = Callable[[PartRecord, Record], Iterator[Record | Rejected]]
"""What is written of a document, or why nothing is."""


def collect(
    source: Source,
    path: Path,
    *,
    domains: tuple[str, ...],
    max_bytes: int,
    seed: int,
    progress: ProgressBar,
    convert: Convert = lambda record, document: cut(document),
) -> Spool:
    """Read `source` into a spool file at `path`. `max_bytes` 0 means no limit; `domains` empty means all.

    Raises:
        DataError: an unknown domain, or nothing usable at all.
    """
    parts = _by_domain(source, domains)
    available = sum(p.size for ps in parts.values() for p in ps)
    spool = Spool(path, domains=tuple(sorted(parts)), available_bytes=available, account=Account(source))
    progress.phase("reading", min(max_bytes or available, available))
    with path.open("wb") as file:
        sink = _Sink(file, spool, progress)
        ordered = [_ordered(parts[name], name, seed) for name in spool.domains]
        readers = [_Reader(i, mine, sink, convert) for i, mine in enumerate(ordered)]
        _share(readers, max_bytes or math.inf)
        for reader in readers:
            reader.drain()
        sink.close()
    for record in spool.account.records.values():
        if not record.opened:
            record.reason = LIMIT if record.domain in parts else NO_DOMAIN
    if not len(spool):
        raise _nothing_usable(source, spool.rejects, max_bytes)
    for reader, name in zip(readers, spool.domains, strict=True):
        if not reader.used:
            spool.account.add(rejected(name, "domain without a usable document in its share of max_bytes"))
    return spool


def _by_domain(source: Source, wanted: tuple[str, ...]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in source.parts:
        found.setdefault(part.domain, []).append(part)
    missing = sorted(set(wanted) - set(found))
    if missing and found:
        raise DataError(
            "Unknown data domain",
            where="data.domains",
            got=", ".join(missing),
            need="some of: " + ", ".join(sorted(found)),
            try_="data.domains = []   (all of them)",
        )
    return {name: found[name] for name in sorted(found) if not wanted or name in wanted}


def _ordered(parts: list[Part], domain: str, seed: int) -> list[Part]:
    return sorted(parts, key=lambda p: (xxhash.xxh3_64_intdigest(f"{seed}\0{domain}\0{p.name}".encode()), p.name))


def _share(readers: list["_Reader"], max_bytes: float) -> None:
    """Let every reader read up to an equal share, then give what the small ones left to the others, and again."""
    left, alive = max_bytes, readers
    while alive and (left == math.inf or left > _SLACK * max_bytes):
        before = sum(r.used for r in readers)
        for reader in alive:
            reader.read(left / len(alive))
        alive = [r for r in alive if not r.exhausted]
        used = sum(r.used for r in readers)
        if used == before:
            return
        left = max_bytes - used


class _Reader:
    """Reads one domain in steps, each up to an allowance, and remembers the document that did not fit."""

    def __init__(self, domain: int, parts: list[Part], sink: "_Sink", convert: Convert):
        self.domain, self.used, self.exhausted, self._sink = domain, 0, False, sink
        self._convert = convert
        self._items = self._documents(parts)
        self._stop = False  # no further part is opened
        self._pending: tuple[PartRecord, str, bytes] | None = None

    def read(self, allowance: float) -> None:
        until = self.used + allowance
        while True:
            item = self._pending or next(self._items, None)
            if item is None:
                self.exhausted = True
                return
            record, name, data = item
            if self.used + len(data) > until:
                self._pending = item
                return
            self._pending = None
            self._sink.write(self.domain, record, name, data)
            self.used += len(data)

    def drain(self) -> None:
        """Count what the limit left of the part that is being read: all of it, or its next few MiB and one rest."""
        self._stop = True
        left = _DRAINED_BYTES
        item = self._pending
        while item is not None:
            record, _, data = item
            self._sink.account.count(record, LIMIT, 1, len(data))
            left -= len(data)
            if left < 0:
                self._sink.account.count(record, LIMIT + ", the rest of the file is not read", 1, 0)
                return
            item = next(self._items, None)

    def _documents(self, parts: list[Part]) -> Iterator[tuple[PartRecord, str, bytes]]:
        for part in parts:
            if self._stop:
                return
            record = self._sink.account.open(part)
            for item in _readable(part):
                if isinstance(item, Rejected):
                    self._sink.account.refuse(record, item)
                    continue
                for piece in self._convert(record, item):
                    if isinstance(piece, Rejected):
                        self._sink.account.refuse(record, piece)
                        continue
                    cleaned = self._sink.clean(record, piece)
                    if cleaned:
                        yield record, piece.place, cleaned


def _readable(part: Part) -> Iterator[Record | Rejected]:
    try:
        yield from part.read()
    except OSError as error:
        if is_of_machine(error) or error.errno == errno.EIO:  # what is cached would lack the file for ever
            raise machine_error(error, part.file or part.name) from error
        yield rejected(part.file or part.name, "cannot be read", str(error.strerror or error))


class _Sink:
    """Appends documents to the spool; knows which texts it has seen."""

    def __init__(self, file: BinaryIO, spool: Spool, progress: ProgressBar):
        self.account = spool.account
        self._file, self._spool, self._progress = file, spool, progress
        self._seen: set[bytes] = set()
        self._domains: list[int] = []
        self._lengths: list[int] = []

    def clean(self, record: PartRecord, document: Record) -> bytes | None:
        """UTF-8, repaired as a build repairs it; None for a blank text, a duplicate or broken Unicode."""
        text, notes = repaired(document.text, _REPAIR)
        for note in notes:
            self.account.note(note)
        if not text or text.isspace():
            self.account.refuse(record, rejected(record.file, BLANK, num_bytes=_num_bytes(document)))
            return None
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            why, num_bytes = error.reason, _num_bytes(document)
            self.account.refuse(record, rejected(record.file, HALF_PAIR, why, num_bytes=num_bytes))
            return None
        digest = xxhash.xxh3_128_digest(data)
        if digest in self._seen:
            self._spool.num_duplicates += 1
            self.account.count(record, DUPLICATE, 1, len(data))
            return None
        self._seen.add(digest)
        return data

    def write(self, domain: int, record: PartRecord, name: str, data: bytes) -> None:
        self._file.write(data)
        record.documents += 1
        record.text_bytes += len(data)
        self._spool.records.append(record)
        self._spool.names.append(name)
        self._domains.append(domain)
        self._lengths.append(len(data))
        self._progress.advance(len(data))

    def close(self) -> None:
        lengths = np.array(self._lengths, np.int64)
        self._spool.lengths = lengths
        self._spool.offsets = np.cumsum(lengths) - lengths
        self._spool.domain_of = np.array(self._domains, np.int32)


def _num_bytes(document: Record) -> int:
    return len(document.text.encode("utf-8", "surrogatepass"))


def _nothing_usable(source: Source, rejects: list[Rejected], max_bytes: int) -> DataError:
    worst = sorted(rejects, key=lambda r: -r.count)[:5]
    got = [f"{r.path}: {r.rule} ({r.count}x){'; ' + str(r.value) if r.value else ''}" for r in worst]
    if not got and source.parts:
        got = [f"{len(source.parts)} files or row groups, but no document that fits into max_bytes = {max_bytes}"]
    return source.wanted.unusable(source.label, "\n".join(got) or "no files", _hint(worst, source.wanted))


def _hint(rejects: list[Rejected], want: Wanted) -> str:
    """Another use of what was found, "" where none is known."""
    for reject in rejects:
        _, named, fields = str(reject.value).partition("fields")
        listed = fields.lstrip(": ").split(", ") if named else []
        if hint := better_format(want, reject.path, reject.rule, listed):
            return hint
    return ""

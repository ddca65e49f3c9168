"""The texts that models learn from: folders of files of any kind, labelled rows, or a sample of the build's records.

They are read and repaired as records are. Where there is more than asked for, a sample by hash is taken: it does not
depend on the order of files, and no more than twice of it is ever in memory. A text that occurs twice counts once.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import xxhash

from tilewright.core.log import get_logger
from tilewright.data.common.hashing import hash64
from tilewright.data.common.records import Record, text_of
from tilewright.data.engine.build_files import Listing
from tilewright.data.engine.build_settings import DataBuild
from tilewright.data.engine.record_tables import batches
from tilewright.data.sources.file_lines import segment_lines
from tilewright.data.sources.source_parts import cut
from tilewright.data.stages.copies.exact_copies import doc_of
from tilewright.data.stages.read_records import read_item
from tilewright.data.stages.text.repair_text import repaired

log = get_logger(__name__)

READING = ("read.text_field", "read.max_chars", "read.suffixes", "limits", "media", "repair")
"""Settings by which references are read and repaired: those of records."""

_LABELS = {"good": True, "bad": False, "1": True, "0": False, "true": True, "false": False}


@dataclass(frozen=True)
class Piece:
    """A text, or a part of a long one. `key`: hash of the whole text; `number`: of the part."""

    key: int
    number: int
    data: bytes
    label: bool | None = None


@dataclass
class HashSample:
    """The pieces of smallest hash, of about `limit` bytes in all."""

    limit: int
    _held: dict[tuple[int, int], Piece] = field(default_factory=dict)
    _size: int = 0
    _bound: int = 1 << 64

    def add(self, piece: Piece) -> None:
        name = piece.key, piece.number
        if name not in self._held and _draw(piece) < self._bound:
            self._held[name] = piece
            self._size += len(piece.data)
            if self._size > 2 * self.limit:
                self._prune()

    def taken(self) -> list[Piece]:
        """The sample of references that was taken, by hash."""
        self._prune()
        return list(self._held.values())

    def _prune(self) -> None:
        kept: dict[tuple[int, int], Piece] = {}
        size = 0
        for piece in sorted(self._held.values(), key=_draw):
            if size >= self.limit:
                self._bound = _draw(piece)
                break
            kept[piece.key, piece.number] = piece
            size += len(piece.data)
        self._held, self._size = kept, size


def _draw(piece: Piece) -> int:
    return int(hash64(np.uint64(piece.key), piece.number)[0])


def folder_sample(listing: Listing, build: DataBuild | SimpleNamespace, limit: int, setting: str) -> list[Piece]:
    """Take about `limit` bytes of reference text from below a folder, read by the settings `READING` of `build`."""
    sample = HashSample(limit)
    unread = 0
    for item in (item for shard in listing.shards for item in shard):
        for one in read_item(item, build):
            if isinstance(one, Record) and one.modality == "text":
                for piece in _pieces(one.text, build):
                    sample.add(piece)
            unread += not isinstance(one, Record)
    if unread or listing.rejects:
        log.warning("%s: %d files or rows of it cannot be read", setting, unread + len(listing.rejects))
    return sample.taken()


def labelled_sample(path: Path, build: DataBuild | SimpleNamespace, limit: int) -> list[Piece]:
    """Take about `limit` bytes of reference text per label, from rows with a text and a label."""
    samples = {True: HashSample(limit), False: HashSample(limit)}
    skipped, why = 0, ""
    for start, line in segment_lines(path, 0, path.stat().st_size, build.limits.line_bytes):
        try:
            row = json.loads(line)
            text, label = row[build.read.text_field], _LABELS[str(row["label"]).lower()]
            if not isinstance(text, str):
                raise TypeError("the text is no text")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            skipped += 1
            why = why or f"byte {start}: {type(error).__name__} {error}"
            continue
        for piece in _pieces(text, build, label):
            samples[label].add(piece)
    if skipped:
        log.warning("quality.labelled: %d rows have no text or no label good or bad; %s", skipped, why)
    return samples[True].taken() + samples[False].taken()


def _pieces(text: str, build: DataBuild | SimpleNamespace, label: bool | None = None) -> Iterator[Piece]:
    """Cut a reference text into pieces as records have it: repaired, and cut where it is long."""
    data = repaired(text, build.repair)[0].encode("utf-8", "replace")
    if not data.strip():
        return
    key = xxhash.xxh3_64_intdigest(data)
    for number, piece in enumerate(cut(text_of("", data.decode()), build.read.max_chars)):
        yield Piece(key, number, piece.text.encode(), label)


def digests_of(kept: Path) -> np.ndarray:
    """Digests of reference records: the first half of the digest of each row of a `kept.parquet`, uint64."""
    found = [np.zeros(0, np.uint64)]
    for _, batch in batches(kept / "kept.parquet", ("digest",)):
        found.append(np.frombuffer(b"".join(batch["digest"]), "<u8").reshape(-1, 2)[:, 0])
    return np.concatenate(found)


def half_of(digests: np.ndarray) -> np.ndarray:
    """The half of the corpus that each record belongs to, int64: 0 or 1. A record is scored by a reference model of the
    other half."""
    return (hash64(0x4A1F, digests) & np.uint64(1)).astype(np.int64)


def corpus_sample(repaired_: Sequence[Path], kept: Sequence[Path], limit: int) -> tuple[list[Piece], list[Piece]]:
    """Take about `limit` bytes of records of each half of the corpus as reference (`half_of`).

    Args:
        repaired_: folders with the text of the shards.
        kept: folders that say which records stay.
        limit: bytes.
    """
    digest, size, doc = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for shard, folder in enumerate(kept):
        digest.append(digests_of(folder))
        for _, batch in batches(folder / "kept.parquet", ("row", "bytes")):
            size.append(np.array(batch["bytes"], np.int64))
            doc.append(doc_of(shard, np.array(batch["row"], np.int64)))
    digests, sizes, docs = np.concatenate(digest), np.concatenate(size), np.concatenate(doc)
    halves = half_of(digests)
    chosen = []
    for half in (0, 1):
        mine = np.flatnonzero((halves == half) & (sizes > 0))
        order = mine[np.argsort(hash64(digests[mine], 0), kind="stable")]
        before = np.cumsum(sizes[order]) - sizes[order]
        chosen.append(order[before < limit])
    wanted = dict.fromkeys(np.concatenate(chosen).tolist())
    texts = dict(_texts_of(repaired_, docs, np.array(sorted(wanted), np.int64)))
    samples = ([Piece(int(digests[i]), 0, texts[i]) for i in one.tolist() if i in texts] for one in chosen)
    return next(samples), next(samples)


def _texts_of(repaired_: Sequence[Path], docs: np.ndarray, wanted: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Reference texts of records: (index, text) of the `docs[wanted]` that are text."""
    for shard, folder in enumerate(repaired_):
        first, stop = np.searchsorted(docs[wanted], [doc_of(s, np.zeros(1, np.int64))[0] for s in (shard, shard + 1)])
        if first == stop:
            continue
        rows = {int(docs[i]) & ((1 << 40) - 1): i for i in wanted[first:stop].tolist()}
        for start, batch in batches(folder / "records.parquet", ("text", "modality")):
            for row, (text, modality) in enumerate(zip(batch["text"], batch["modality"], strict=True), start):
                if row in rows and modality == "text":
                    yield rows[row], text.encode()

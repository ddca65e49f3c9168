"""Tensors of images and sounds: written as they are read, and of what stays gathered into shards.

`pixels.npy` is uint8 [images, 3, size, size]; `log_mel.npy` is float32 [frames of all sounds, num_mels]. A table beside
them says which record each is of, and where it begins.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from tilewright.data.common.npy_writer import NpyWriter
from tilewright.data.common.records import Record
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import MediaSection
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Only, Same
from tilewright.data.engine.record_tables import TableWriter, batches, rows
from tilewright.data.engine.unit_folders import link_or_copy
from tilewright.data.stages.split.split_stage import HELD, SHOWN, SHOWN_HELD, TRAIN
from tilewright.data.stages.stage_order import last_kept

KINDS: tuple[str, ...] = ("pixels", "log_mel")
_WHERE = [pa.field("first", pa.int64()), pa.field("count", pa.int64())]
ARRAYS = pa.schema([pa.field("id", pa.string()), pa.field("kind", pa.string()), *_WHERE])
"""Entries [first, first + count) of the array `kind` are those of a record."""
MEDIA = pa.schema(
    [
        *(pa.field(n, pa.string()) for n in ("id", "kind", "split", "domain", "text", "path", "part", "facts", "file")),
        *_WHERE,
    ]
)
"""A row per tensor of the dataset; `file` is where it is, in the folder `media`."""
_SPLITS = {TRAIN: "train", SHOWN: "train", HELD: "holdout", SHOWN_HELD: "holdout"}


class ArrayWriter:
    """Writes the arrays of images and sounds of a shard's records, a file for each kind asked for. A context manager.

    Args:
        folder: gets `arrays.parquet` and the arrays; nothing where none are asked for.
        media: settings.
    """

    def __init__(self, folder: Path, media: MediaSection):
        self._files, self._next = ExitStack(), dict.fromkeys(KINDS, 0)
        wanted: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        if media.image_size:
            wanted["pixels"] = np.dtype("u1"), (3, media.image_size, media.image_size)
        if media.log_mel:
            wanted["log_mel"] = np.dtype("<f4"), (media.num_mels,)
        self._arrays = {
            kind: self._files.enter_context(NpyWriter(folder / f"{kind}.npy", *form)) for kind, form in wanted.items()
        }
        self._table = self._files.enter_context(TableWriter(folder / "arrays.parquet", ARRAYS)) if wanted else None

    def append(self, record: Record) -> None:
        """Append the media arrays of a record's images and sounds that are asked for."""
        for kind, array in record.arrays.items():
            self.write(record.id, kind, array[None] if kind == "pixels" else array)

    def write(self, record_id: str, kind: str, entries: np.ndarray) -> int:
        """Write the media array (pixels or log-mel frames) of one record; returns where its entries begin."""
        first = self._next[kind]
        self._arrays[kind].append(entries)
        assert self._table is not None
        self._table.append({"id": record_id, "kind": kind, "first": first, "count": len(entries)})
        self._next[kind] += len(entries)
        return first

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._files.__exit__(kind, error, trace)


def media_shards(c: Context) -> int:
    """Number of media shards: units that gather tensors of images and sounds: all where any is kept, else none."""
    return c.num_shards if c.build.media.image_size or c.build.media.log_mel else 0


def gather_shard(
    index: int, settings: SimpleNamespace, folder: Path, *, read: Path, records: Path, kept: Path, split: Path
) -> Mapping[str, Any]:
    """Gather a shard of media: tensors of images and sounds that stay, and `media.parquet` with a row for each.

    Args:
        index: of the shard.
        settings: media.
        folder: gets the files.
        read: folder with the arrays of all records.
        records: folder with the records.
        kept: folder with the side table of those that stay.
        split: folder with the part that each of them goes to.
    """
    counts = dict.fromkeys(KINDS, 0)
    sources = {kind: _open(read / f"{kind}.npy") for kind in KINDS}
    where = {row["id"]: row for row in rows(read / "arrays.parquet")}
    with ArrayWriter(folder, settings.media) as arrays, TableWriter(folder / "media.parquet", MEDIA) as table:
        for row, part in _staying(records, kept, split / f"{index:05}.npy") if where else ():
            entry = where.get(row["id"])
            if entry is None or part not in _SPLITS:
                continue
            kind, begin = entry["kind"], entry["first"]
            first = arrays.write(row["id"], kind, sources[kind][begin : begin + entry["count"]])
            counts[kind] += 1
            place = {"kind": kind, "split": _SPLITS[part], "first": first, "count": entry["count"]}
            table.append({name: row.get(name) for name in MEDIA.names} | place)
    return counts


def _open(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else np.zeros(0)


def _staying(repaired: Path, kept: Path, split: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Staying records of media, images and sounds, and the part that each goes to."""
    parts = np.load(split, allow_pickle=False).tolist()
    part_of = {row["row"]: part for row, part in zip(rows(kept / "kept.parquet", ("row",)), parts, strict=True)}
    for first, batch in batches(repaired / "records.parquet"):
        for number in range(len(batch["id"])):
            part = part_of.get(first + number)
            if part is not None and batch["modality"][number] != "text":
                yield {name: column[number] for name, column in batch.items()}, part


def publish_media(shards: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Fill `folder` with the tensors of images and sounds of all shards that have some, and one table of all.

    Returns:
        What a summary says of them: number by split, classes (the domains of images), and the shape of an entry.
    """
    folder.mkdir()
    told: dict[str, Any] = {}
    with TableWriter(folder / "media.parquet", MEDIA) as table:
        for kind in KINDS:
            filled = [one for one in shards if (one / f"{kind}.npy").exists() and len(_open(one / f"{kind}.npy"))]
            counts, domains = dict.fromkeys(_SPLITS.values(), 0), set()
            for number, one in enumerate(filled):
                name = f"{kind}-{number:05}-of-{len(filled):05}.npy"
                link_or_copy(str(one / f"{kind}.npy"), str(folder / name))
                for row in rows(one / "media.parquet"):
                    if row["kind"] == kind:
                        table.append(row | {"file": name})
                        counts[row["split"]] += 1
                        domains.add(row["domain"])
            if filled:
                shape = list(_open(filled[0] / f"{kind}.npy").shape[1:])
                told[kind] = counts | {"domains": sorted(domains), "shape": shape}
    return json.loads(json.dumps(told))


GATHER_MEDIA = BuildStage(
    *("media", "gathering pixels and sounds", 2, media_shards, gather_shard, ("media",)),
    {
        "read": Same("read", told=True),
        "records": Same("repair"),
        "kept": Same(last_kept),
        "split": Only("split"),
    },
)

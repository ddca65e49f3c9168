"""Exact duplicates: digests of all shards by ranges of their hash; of records with one digest the first stays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.data.build.ranges import num_ranges, read_range, write_ranges
from tilewright.data.build.tables import batches

KEY = np.dtype([("key", "<u8"), ("more", "<u8"), ("doc", "<u8")])
DROP = np.dtype([("doc", "<u8"), ("stays", "<u8"), ("similarity", "<f4")])
"""A record that goes, the one that it resembles, and how much."""

_ROW_BITS = 40


def doc_of(shard: int, rows: np.ndarray) -> np.ndarray:
    """Number of each row of a shard over all shards, uint64; in the order of the dataset."""
    return np.uint64(shard << _ROW_BITS) | rows.astype(np.uint64)


def shard_of(docs: np.ndarray) -> np.ndarray:
    return (docs >> np.uint64(_ROW_BITS)).astype(np.int64)


def row_of(docs: np.ndarray) -> np.ndarray:
    return (docs & np.uint64((1 << _ROW_BITS) - 1)).astype(np.int64)


def ranges_for(records: int) -> int:
    """Ranges over which the digests of `records` are shared out."""
    return num_ranges(KEY.itemsize * records)


def digest_keys(source: Path, shard: int, num: int, folder: Path) -> Mapping[str, Any]:
    """Write the digests of a shard's records over `num` ranges."""
    found = [np.zeros(0, KEY)]
    for _, batch in batches(source / "kept.parquet", ("row", "digest")):
        halves = np.frombuffer(b"".join(batch["digest"]), "<u8").reshape(-1, 2)
        keys = np.zeros(len(halves), KEY)
        keys["key"], keys["more"] = halves[:, 0], halves[:, 1]
        keys["doc"] = doc_of(shard, np.array(batch["row"], np.int64))
        found.append(keys)
    rows = np.concatenate(found)
    write_ranges(folder / "digests", rows, num)
    return {"records": len(rows)}


def exact_duplicates(shards: list[Path], index: int, folder: Path) -> Mapping[str, Any]:
    """Write which records of range `index` go, sorted by record."""
    keys = read_range([shard / "digests" for shard in shards], index, KEY)
    keys = keys[np.lexsort((keys["doc"], keys["more"], keys["key"]))]
    same = np.zeros(len(keys), bool)
    same[1:] = (keys["key"][1:] == keys["key"][:-1]) & (keys["more"][1:] == keys["more"][:-1])
    leader = np.maximum.accumulate(np.where(same, 0, np.arange(len(keys))))
    drops = np.zeros(int(same.sum()), DROP)
    drops["doc"], drops["stays"], drops["similarity"] = keys["doc"][same], keys["doc"][leader[same]], 1.0
    np.save(folder / "drops.npy", np.sort(drops, order="doc"))
    return {"duplicates": len(drops)}

"""Exact duplicates: digests of all shards by ranges of their hash; of records with one digest the first stays."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, FoundValue, Same
from tilewright.data.engine.hash_ranges import num_ranges, read_range, slice_of, write_ranges
from tilewright.data.engine.record_tables import batches
from tilewright.data.stages.stage_order import before_copies

KEY = np.dtype([("key", "<u8"), ("more", "<u8"), ("doc", "<u8")])
DROP = np.dtype([("doc", "<u8"), ("stays", "<u8"), ("similarity", "<f4")])
"""A record that goes, the one that it resembles, and how much."""

_ROW_BITS = 40


def doc_of(shard: int, rows: np.ndarray) -> np.ndarray:
    """Number the rows of a shard over all shards, in the order of the dataset (uint64), to search for copies."""
    return np.uint64(shard << _ROW_BITS) | rows.astype(np.uint64)


def shard_of(docs: np.ndarray) -> np.ndarray:
    return (docs >> np.uint64(_ROW_BITS)).astype(np.int64)


def row_of(docs: np.ndarray) -> np.ndarray:
    return (docs & np.uint64((1 << _ROW_BITS) - 1)).astype(np.int64)


def drops_of(searches: Sequence[Path], shard: int) -> np.ndarray:
    """Collect the records of a shard that go (`DROP`), sorted, from the units of stages that searched for copies."""
    first, stop = (int(doc_of(s, np.zeros(1, np.int64))[0]) for s in (shard, shard + 1))
    found = [slice_of(folder / "drops.npy", first, stop, "doc") for folder in searches]
    return np.sort(np.concatenate([np.zeros(0, DROP), *found]), order="doc")


def num_records(c: Context) -> int:
    """Number of records among which exact copies are searched."""
    return c.total(before_copies(c.build), "records")


def exact_ranges(c: Context) -> int:
    """Exact copies by ranges, over which the digests of the records are shared out; 0 where they stay."""
    return num_ranges(KEY.itemsize * num_records(c)) if c.build.duplicates.exact else 0


def digest_keys(index: int, settings: SimpleNamespace, folder: Path, *, kept: Path, num: int) -> Mapping[str, Any]:
    """Write the digests of a shard's records over `num` ranges, as keys to exact copies."""
    found = [np.zeros(0, KEY)]
    for _, batch in batches(kept / "kept.parquet", ("row", "digest")):
        halves = np.frombuffer(b"".join(batch["digest"]), "<u8").reshape(-1, 2)
        keys = np.zeros(len(halves), KEY)
        keys["key"], keys["more"] = halves[:, 0], halves[:, 1]
        keys["doc"] = doc_of(index, np.array(batch["row"], np.int64))
        found.append(keys)
    rows = np.concatenate(found)
    write_ranges(folder / "digests", rows, num)
    return {"records": len(rows)}


def exact_duplicates(
    index: int, settings: SimpleNamespace, folder: Path, *, digests: Sequence[Path]
) -> Mapping[str, Any]:
    """Write which exact duplicates of range `index` go, sorted by record."""
    keys = read_range([shard / "digests" for shard in digests], index, KEY)
    keys = keys[np.lexsort((keys["doc"], keys["more"], keys["key"]))]
    same = np.zeros(len(keys), bool)
    same[1:] = (keys["key"][1:] == keys["key"][:-1]) & (keys["more"][1:] == keys["more"][:-1])
    leader = np.maximum.accumulate(np.where(same, 0, np.arange(len(keys))))
    drops = np.zeros(int(same.sum()), DROP)
    drops["doc"], drops["stays"], drops["similarity"] = keys["doc"][same], keys["doc"][leader[same]], 1.0
    np.save(folder / "drops.npy", np.sort(drops, order="doc"))
    return {"duplicates": len(drops)}


DIGESTS = BuildStage(
    *("digests", "hashing texts", 1, lambda c: c.num_shards if c.build.duplicates.exact else 0, digest_keys),
    inputs={"kept": Same(before_copies), "num": FoundValue(lambda c, i: exact_ranges(c))},
)
EXACT = BuildStage(
    *("exact", "finding exact duplicates", 1, exact_ranges, exact_duplicates),
    inputs={"digests": Every("digests")},
)

"""What stays of a shard after both searches for copies: the records' side table, and a reject for each copy."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.data.build.config import DuplicatesSection
from tilewright.data.build.stages.copies.exact import DROP, row_of, shard_of
from tilewright.data.build.stages.copies.images import BITS
from tilewright.data.build.stages.rules import KEPT, survivors
from tilewright.data.build.tables import REJECTS, TableWriter, batches, reject_row
from tilewright.data.common.records import Rejected

EXACT, NEAR, IMAGE = "exact duplicate", "near-copy", "near-copy of an image"
_HELD = 64  # shards whose ids are in memory
_COLUMNS = ("id", "text", "domain", "path", "part")


def unique_records(
    repaired: list[Path],
    kept: Path,
    shard: int,
    exact: np.ndarray,
    near: np.ndarray,
    images: np.ndarray,
    duplicates: DuplicatesSection,
    folder: Path,
) -> Mapping[str, Any]:
    """Write `kept.parquet` and `rejects.parquet` of a shard.

    Args:
        repaired: folders of the repaired records of all shards: a reject names the record that stays.
        kept: folder with the side table of the shard's records that keep to the rules.
        shard: number of the shard.
        exact, near, images: what goes of this shard (`DROP`), sorted.
        duplicates: settings.
        folder: gets the files.
    """

    @lru_cache(maxsize=_HELD)
    def ids(other: int) -> list[str]:
        return [one for _, batch in batches(repaired[other] / "records.parquet", ("id",)) for one in batch["id"]]

    drops = np.concatenate([np.zeros(0, DROP), exact, near, images])
    of_each = [(EXACT, 1.0)] * len(exact) + [(NEAR, duplicates.threshold)] * len(near)
    of_each += [(IMAGE, float(duplicates.image_distance))] * len(images)
    by_row = {row: i for i, row in enumerate(row_of(drops["doc"]).tolist())}
    num_bytes = 0
    with (
        TableWriter(folder / "kept.parquet", KEPT) as staying,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        for row in survivors(kept / "kept.parquet", row_of(drops["doc"])):
            staying.append(row)
            num_bytes += row["bytes"]
        for first, batch in batches(repaired[shard] / "records.parquet", _COLUMNS) if len(drops) else ():
            for row, values in enumerate(zip(*batch.values(), strict=True), first):
                if row in by_row:
                    drop = by_row[row]
                    stays = int(drops["stays"][drop])
                    of = ids(int(shard_of(np.uint64(stays))))[int(row_of(np.uint64(stays)))]
                    rule, threshold = of_each[drop]
                    found = drops["similarity"][drop]
                    value = f"{found:.0f} bits of {BITS} from {of}" if rule == IMAGE else f"{found:.3f} with {of}"
                    one = dict(zip(batch, values, strict=True))
                    rejects.append(reject_row(_reject(one, rule, value, threshold)))
        counts = {"records": staying.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    return counts | {"exact": len(exact), "near": len(near) + len(images)}


def _reject(row: Mapping[str, Any], rule: str, value: str, threshold: float) -> Rejected:
    size = len(row["text"].encode())
    place = row["path"], row["part"]
    return Rejected(*place, "duplicates", rule, value, threshold, row["text"], row["domain"], 1, size, row["id"])

"""The records of a shard that stay after both searches for copies: the records' side table, and a reject for each
copy."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.data.common.record_filter import DropReason
from tilewright.data.common.records import DUPLICATE
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, Only, Same, per_shard
from tilewright.data.engine.record_tables import REJECTS, TableWriter, batches
from tilewright.data.stages.copies.exact_copies import DROP, drops_of, exact_ranges, row_of, shard_of
from tilewright.data.stages.copies.image_copies import BITS, image_units
from tilewright.data.stages.kept_records import KEPT, reject_of, survivors
from tilewright.data.stages.stage_order import before_copies

NEAR, IMAGE = "near-copy", "near-copy of an image"
_HELD = 64  # shards whose ids are in memory
_COLUMNS = ("id", "text", "domain", "path", "part")


def unique_records(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Sequence[Path],
    kept: Path,
    exact: Sequence[Path],
    near: Path,
    images: Sequence[Path],
) -> Mapping[str, Any]:
    """Unique records: write `kept.parquet` and `rejects.parquet` of a shard without copies.

    Args:
        index: of the shard.
        settings: duplicates.
        folder: gets the files.
        records: folders of the repaired records of all shards: a reject names the record that stays.
        kept: folder with the side table of the shard's records that pass the rules.
        exact, near, images: folders that say what goes.
    """
    duplicates = settings.duplicates

    # A reject names the record that stays, which may be in another shard.
    @lru_cache(maxsize=_HELD)
    def ids(other: int) -> list[str]:
        return [one for _, batch in batches(records[other] / "records.parquet", ("id",)) for one in batch["id"]]

    # 1. What goes, by all three searches, with the rule of each.
    copies, near_copies, pictures = (drops_of(found, index) for found in (exact, [near], images))
    drops = np.concatenate([np.zeros(0, DROP), copies, near_copies, pictures])
    of_each = [(DUPLICATE, 1.0)] * len(copies) + [(NEAR, duplicates.threshold)] * len(near_copies)
    of_each += [(IMAGE, float(duplicates.image_distance))] * len(pictures)
    by_row = {row: i for i, row in enumerate(row_of(drops["doc"]).tolist())}
    num_bytes = 0
    with (
        TableWriter(folder / "kept.parquet", KEPT) as staying,
        TableWriter(folder / "rejects.parquet", REJECTS) as rejects,
    ):
        # 2. What stays: the side table only, since text stays where it is.
        for row in survivors(kept / "kept.parquet", row_of(drops["doc"])):
            staying.append(row)
            num_bytes += row["bytes"]
        # 3. What goes, with its text: nothing is dropped that cannot be looked at.
        for first, batch in batches(records[index] / "records.parquet", _COLUMNS) if len(drops) else ():
            for row, values in enumerate(zip(*batch.values(), strict=True), first):
                if row in by_row:
                    drop = by_row[row]
                    stays = int(drops["stays"][drop])
                    place = np.array([stays], np.uint64)
                    of = ids(int(shard_of(place)[0]))[int(row_of(place)[0])]
                    rule, threshold = of_each[drop]
                    found = drops["similarity"][drop]
                    value = f"{found:.0f} bits of {BITS} from {of}" if rule == IMAGE else f"{found:.3f} with {of}"
                    one = dict(zip(batch, values, strict=True))
                    rejects.append(reject_of(one, "duplicates", DropReason(rule, value, threshold)))
        counts = {"records": staying.num_rows, "bytes": num_bytes, "rejects": rejects.num_rows}
    return counts | {"exact": len(copies), "near": len(near_copies) + len(pictures)}


UNIQUE = BuildStage(
    *("unique", "dropping copies", 3, per_shard, unique_records),
    ("duplicates.threshold", "duplicates.image_distance"),
    {
        "records": Every("repair"),
        "kept": Same(before_copies),
        "exact": Every("exact", exact_ranges),
        "near": Only("near"),
        "images": Every("images", image_units),
    },
)

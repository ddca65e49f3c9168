"""Lines that repeat across records: counted per shard, summed by ranges of their hash. Menus, footers, licences.

A line counts once per record that it is in. Only `repair.repeated_lines` above 0 asks for it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.data.build.config import RepairSection
from tilewright.data.build.ranges import num_ranges, read_range, write_ranges
from tilewright.data.build.stages.repair import line_hash, repaired
from tilewright.data.build.tables import batches

ROW = np.dtype([("key", "<u8"), ("count", "<u4")])
_LINE_BYTES = 60  # of text per line, about: for the number of ranges


def ranges_for(text_bytes: int) -> int:
    """Ranges over which the lines of `text_bytes` of text are shared out."""
    return num_ranges(ROW.itemsize * text_bytes // _LINE_BYTES)


def count_lines(source: Path, num: int, repair: RepairSection, folder: Path) -> Mapping[str, Any]:
    """Write how many records of the shard each line is in, over `num` ranges."""
    found: list[np.ndarray] = []
    for _, batch in batches(source / "records.parquet", ("text", "domain")):
        hashes: list[int] = []
        for text, domain in zip(batch["text"], batch["domain"], strict=True):
            lines = {line.strip() for line in repaired(text, repair)[0].split("\n")}
            hashes += [line_hash(domain, line) for line in lines if len(line) >= repair.repeated_line_chars]
        found = [_summed([*found, _counted(np.array(hashes, np.uint64), 1)])]
    rows = _summed(found)
    write_ranges(folder / "lines", rows, num)
    return {"lines": len(rows)}


def common_lines(shards: list[Path], index: int, repair: RepairSection, folder: Path) -> Mapping[str, Any]:
    """Write the sorted hashes of the lines of range `index` that are in enough records of all shards."""
    rows = _summed([read_range([shard / "lines" for shard in shards], index, ROW)])
    common = rows["key"][rows["count"] >= repair.repeated_lines]
    np.save(folder / "common.npy", common)
    return {"lines": len(rows), "repeated": len(common)}


def _counted(keys: np.ndarray, count: int) -> np.ndarray:
    rows = np.zeros(len(keys), ROW)
    rows["key"], rows["count"] = keys, count
    return rows


def _summed(found: list[np.ndarray]) -> np.ndarray:
    """The rows with one per key, counts added, sorted by key."""
    rows = np.concatenate([np.zeros(0, ROW), *found])
    keys, inverse = np.unique(rows["key"], return_inverse=True)
    counts = np.bincount(inverse, rows["count"], minlength=len(keys))
    summed = np.zeros(len(keys), ROW)
    summed["key"], summed["count"] = keys, counts
    return summed


def load_common(folders: list[Path]) -> np.ndarray:
    """All repeated lines of a build, as sorted hashes; empty where none was looked for."""
    return np.sort(
        np.concatenate([np.zeros(0, np.uint64), *(np.load(one / "common.npy", allow_pickle=False) for one in folders)])
    )

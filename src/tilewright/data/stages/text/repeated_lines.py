"""Lines that repeat across records: counted per shard, summed by ranges of their hash. Menus, footers, licences.

A line counts once per record that it is in. Only `repair.repeated_lines` above 0 asks for it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, FoundValue, Same
from tilewright.data.engine.hash_ranges import num_ranges, read_range, write_ranges
from tilewright.data.engine.record_tables import batches
from tilewright.data.stages.text.repair_text import line_hash, repaired

ROW = np.dtype([("key", "<u8"), ("count", "<u4")])
_LINE_BYTES = 60  # of text per line, about: for the number of ranges


def line_ranges(c: Context) -> int:
    """Ranges over which the lines of the text are shared out; 0 where no repeated lines are looked for."""
    if not c.build.repair.repeated_lines:
        return 0
    return num_ranges(ROW.itemsize * c.total("read", "bytes") // _LINE_BYTES)


def count_lines(index: int, settings: SimpleNamespace, folder: Path, *, records: Path, num: int) -> Mapping[str, Any]:
    """Count lines to find repeated ones: write how many records of the shard each is in, over `num` ranges."""
    repair = settings.repair
    found: list[np.ndarray] = []
    for _, batch in batches(records / "records.parquet", ("text", "domain")):
        hashes: list[int] = []
        for text, domain in zip(batch["text"], batch["domain"], strict=True):
            lines = {line.strip() for line in repaired(text, repair)[0].split("\n")}
            hashes += [line_hash(domain, line) for line in lines if len(line) >= repair.repeated_line_chars]
        found = [_summed([*found, _counted(np.array(hashes, np.uint64), 1)])]
    rows = _summed(found)
    write_ranges(folder / "lines", rows, num)
    return {"lines": len(rows)}


def common_lines(index: int, settings: SimpleNamespace, folder: Path, *, lines: Sequence[Path]) -> Mapping[str, Any]:
    """Common lines, repeated across records: write the sorted hashes of those of range `index` that are in enough
    records of all shards."""
    rows = _summed([read_range([shard / "lines" for shard in lines], index, ROW)])
    common = rows["key"][rows["count"] >= settings.repair.repeated_lines]
    np.save(folder / "common.npy", common)
    return {"lines": len(rows), "repeated": len(common)}


def _counted(keys: np.ndarray, count: int) -> np.ndarray:
    rows = np.zeros(len(keys), ROW)
    rows["key"], rows["count"] = keys, count
    return rows


def _summed(found: list[np.ndarray]) -> np.ndarray:
    """Sum the counts of repeated lines: one row per key, counts added, sorted by key."""
    rows = np.concatenate([np.zeros(0, ROW), *found])
    keys, inverse = np.unique(rows["key"], return_inverse=True)
    counts = np.bincount(inverse, rows["count"], minlength=len(keys))
    summed = np.zeros(len(keys), ROW)
    summed["key"], summed["count"] = keys, counts
    return summed


def load_common(folders: Sequence[Path]) -> np.ndarray:
    """All repeated lines of a build, as sorted hashes; empty where none was looked for."""
    return np.sort(
        np.concatenate([np.zeros(0, np.uint64), *(np.load(one / "common.npy", allow_pickle=False) for one in folders)])
    )


LINES = BuildStage(
    *("lines", "counting lines", 1, lambda c: c.num_shards if c.build.repair.repeated_lines else 0, count_lines),
    ("repair",),
    {"records": Same("read"), "num": FoundValue(lambda c, i: line_ranges(c))},
)
COMMON_LINES = BuildStage(
    *("common_lines", "finding lines that repeat", 1, line_ranges, common_lines, ("repair.repeated_lines",)),
    {"lines": Every("lines")},
)

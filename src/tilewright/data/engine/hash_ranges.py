"""Rows of numbers on disk by ranges of a hash: what many units write, one unit can read of all of them, range by range.

This is how a global question (which lines, texts or bands of sketches occur twice?) is answered in bounded memory: each
shard writes its rows sorted by range; then each range is read from all shards and is small enough to be sorted whole.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

RANGE_BYTES = 32 << 20
"""About what one range of all shards holds."""


def num_ranges(num_bytes: int) -> int:
    """Number of hash ranges over which `num_bytes` of rows are shared out."""
    return 1 + num_bytes // RANGE_BYTES


def range_of(keys: np.ndarray, num: int) -> np.ndarray:
    """The hash range of each uint64 key, int64: equal parts of the hash's values."""
    return ((keys >> np.uint64(32)) * np.uint64(num) >> np.uint64(32)).astype(np.int64)


def write_ranges(path: Path, rows: np.ndarray, num: int, key: str = "key") -> None:
    """Write structured `rows` by ranges of a hash to `path`.npy, sorted by the range of their field `key`, and the
    ranges' bounds beside.

    Within a range the order of the rows stays.
    """
    which = range_of(rows[key], num)
    order = np.argsort(which, kind="stable")
    np.save(path.with_suffix(".npy"), rows[order])
    np.save(path.with_suffix(".bounds.npy"), np.searchsorted(which[order], np.arange(num + 1)))


def read_range(paths: Iterable[Path], index: int, dtype: np.dtype) -> np.ndarray:
    """Read the rows of hash range `index` of all files, file by file. They are read, not mapped: pages of a map count
    as memory.

    Args:
        paths: as given to `write_ranges`.
        index: of the range.
        dtype: of the rows.
    """
    found = [np.zeros(0, dtype)]
    for path in paths:
        bounds = np.load(path.with_suffix(".bounds.npy"), allow_pickle=False)
        found.append(read_rows(path.with_suffix(".npy"), int(bounds[index]), int(bounds[index + 1])))
    return np.concatenate(found)


def read_rows(path: Path, first: int, stop: int) -> np.ndarray:
    """Read rows [first, stop) of hash ranges in a one-dimensional .npy file."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        assert version == (1, 0)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        file.seek(first * dtype.itemsize, 1)
        return np.fromfile(file, dtype, max(0, min(stop, shape[0]) - first))


def slice_of(path: Path, first: int, stop: int, key: str) -> np.ndarray:
    """Rows of hash ranges with first <= `key` < stop of a structured .npy file that is sorted by `key`."""
    keys = np.load(path, mmap_mode="r", allow_pickle=False)[key]
    return read_rows(path, *np.searchsorted(keys, np.array([first, stop], keys.dtype)).tolist())

"""Near-copies, first phase: sketches of each shard, and candidate pairs by ranges of the hash of a band.

A sketch is 128 MinHash values over shingles of five words (`minhash`); records that share one of 32 bands of
four values are candidates: of similarity 0.65 with probability 0.998, of 0.8 nearly always. Each record of a bucket is
paired with the bucket's first, which is the one that would stay, and with the three before it: all pairs would be
quadratic, and 32 bands give every true pair many chances.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewright.data.common.hashing import hash64, mix64
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, FoundValue, Same, per_shard
from tilewright.data.engine.hash_ranges import num_ranges, read_range, write_ranges
from tilewright.data.engine.record_tables import batches
from tilewright.data.stages.copies.exact_copies import doc_of, drops_of, exact_ranges, num_records, row_of
from tilewright.data.stages.copies.minhash import BAND_ROWS, PERMUTATIONS, shingle_hashes, sketches_of
from tilewright.data.stages.kept_records import survivors
from tilewright.data.stages.stage_order import before_copies

BAND = np.dtype([("key", "<u8"), ("doc", "<u8"), ("merit", "<u4")])
"""`merit`: bytes or quality of the record, see `merits`."""
PAIR = np.dtype([("key", "<u8"), ("a", "<u8"), ("b", "<u8")])
_NUM_BANDS = PERMUTATIONS // BAND_ROWS
_BEFORE = 3


def band_ranges(c: Context) -> int:
    """Ranges over which the bands of the records' sketches are shared out."""
    return num_ranges(BAND.itemsize * _NUM_BANDS * num_records(c))


def pair_ranges(c: Context) -> int:
    """Ranges over which the pairs of records with like sketches are shared out for verification."""
    return num_ranges(PAIR.itemsize * num_records(c))


def by_score(c: Context, i: int) -> bool:
    """True if by score, of records with like sketches, the copy of best quality stays."""
    return c.build.duplicates.keep == "score"


def surviving_texts(
    records: Path, kept: Path, drops: np.ndarray, columns: tuple[str, ...] = ()
) -> Iterator[tuple[np.ndarray, list[str], dict[str, list[Any]]]]:
    """Texts to sketch that stay so far, row group by row group: row numbers, texts and other columns.

    Args:
        records: folder of the stage that repaired the text.
        kept: folder with a `kept.parquet`.
        drops: rows that go, besides those that are not in it.
        columns: others that are wanted.
    """
    alive = survivors(kept / "kept.parquet", drops)
    next_ = next(alive, None)
    for first, batch in batches(records / "records.parquet", ("text", *columns)):
        chosen = []
        stop = first + len(batch["text"])
        while next_ is not None and next_["row"] < stop:
            chosen.append(next_["row"])
            next_ = next(alive, None)
        rows = np.array(chosen, np.int64)
        others = {name: [batch[name][row - first] for row in chosen] for name in columns}
        yield rows, [batch["text"][row - first] for row in chosen], others


def joined(texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Texts joined to be sketched: (uint8 bytes of all texts, first byte of each, bytes of each)."""
    parts = [text.encode() for text in texts]
    sizes = np.array([len(part) for part in parts], np.int64)
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum(sizes) - sizes, sizes


def merits(kept: Path, rows: np.ndarray, sizes: np.ndarray, *, by_score: bool) -> np.ndarray:
    """Merits beside sketches that may decide which of several copies stays, uint32 of each record: its bytes or its
    quality score.

    Args:
        kept: folder with a `kept.parquet`.
        rows: sorted rows of it.
        sizes: bytes of each.
        by_score: its quality score.
    """
    if not by_score:
        return sizes.astype(np.uint32)
    table = [batch for _, batch in batches(kept / "kept.parquet", ("row", "quality"))]
    known = np.array([row for batch in table for row in batch["row"]], np.int64)
    scores = np.array([score or 0.0 for batch in table for score in batch["quality"]])
    return np.rint(1 + 1e5 * scores[np.searchsorted(known, rows)]).astype(np.uint32)


def sketch_shard(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Path,
    kept: Path,
    exact: Sequence[Path],
    num: int,
    by_score: bool,
) -> Mapping[str, Any]:
    """Write the bands of the sketches of a shard's records over `num` ranges.

    Records without words have none, nor have images and sounds: two of them may have the same caption.
    """
    found = [np.zeros(0, BAND)]
    drops = row_of(drops_of(exact, index)["doc"])
    for rows, texts, others in surviving_texts(records, kept, drops, ("modality",)):
        pairs = zip(texts, others["modality"], strict=True)
        wordy = [i for i, (text, modality) in enumerate(pairs) if modality == "text" and text.strip()]
        if not wordy:
            continue
        data, starts, sizes = joined([texts[i] for i in wordy])
        hashes, counts = shingle_hashes(data, starts)
        sketch = sketches_of(hashes, counts)
        bands = np.zeros((len(wordy), _NUM_BANDS), BAND)
        for band in range(_NUM_BANDS):
            key = np.full(len(wordy), band, np.uint64)
            for column in sketch[:, band * BAND_ROWS : (band + 1) * BAND_ROWS].T:
                key = mix64(key ^ column)
            bands["key"][:, band] = key
        bands["doc"] = doc_of(index, rows[wordy])[:, None]
        bands["merit"] = merits(kept, rows[wordy], sizes, by_score=by_score)[:, None]
        found.append(bands[counts > 0].reshape(-1))
    rows_ = np.concatenate(found)
    write_ranges(folder / "bands", rows_, num)
    return {"records": len(rows_) // _NUM_BANDS}


def candidate_pairs(
    index: int, settings: SimpleNamespace, folder: Path, *, sketches: Sequence[Path], num: int
) -> Mapping[str, Any]:
    """Write pairs of records that share a band of range `index`, each once, over `num` ranges of a hash of both."""
    bands = read_range([shard / "bands" for shard in sketches], index, BAND)
    merit = bands["merit"].astype(np.int64)
    rank = np.zeros_like(merit) if settings.duplicates.keep == "first" else -merit
    bands = bands[np.lexsort((bands["doc"], rank, bands["key"]))]
    at = np.arange(len(bands))
    begins = np.ones(len(bands), bool)
    begins[1:] = bands["key"][1:] != bands["key"][:-1]
    leader = np.maximum.accumulate(np.where(begins, at, 0))
    left, right = [], []
    for back in range(_BEFORE + 1):  # 0: the leader
        other = leader if back == 0 else at - back
        true = np.flatnonzero((other >= leader) & (other < at) & ((other > leader) | (back == 0)))
        left.append(bands["doc"][other[true]])
        right.append(bands["doc"][true])
    a, b = np.concatenate(left), np.concatenate(right)
    pairs = np.zeros(len(a), PAIR)
    pairs["a"], pairs["b"] = np.minimum(a, b), np.maximum(a, b)
    pairs = np.unique(pairs)
    pairs["key"] = hash64(pairs["a"], pairs["b"])
    write_ranges(folder / "pairs", pairs, num)
    return {"pairs": len(pairs)}


SKETCHES = BuildStage(
    *("sketches", "sketching texts", 3, per_shard, sketch_shard),
    inputs={
        "records": Same("repair"),
        "kept": Same(before_copies),
        "exact": Every("exact", exact_ranges),
        "num": FoundValue(lambda c, i: band_ranges(c)),
        "by_score": FoundValue(by_score),
    },
)
PAIRS = BuildStage(
    *("pairs", "pairing sketches", 1, band_ranges, candidate_pairs, ("duplicates.keep",)),
    {"sketches": Every("sketches"), "num": FoundValue(lambda c, i: pair_ranges(c))},
)

"""Near-copies, second phase: candidates verified by the Jaccard similarity of their shingles, and which record stays.

Records are taken in the order of the rule that says which stays. One that resembles a record which stays already goes;
any other stays. So each record that goes resembles the one that stays, whatever chains of neighbours there are.
Conversations that say the same, and differ in the system's message or the tools, are no copies: both are trained.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from tilewright.data.common.npy_writer import NpyWriter
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import AddedSetting, Every, FoundValue, Same, one_unit, per_shard
from tilewright.data.engine.hash_ranges import read_range, read_rows
from tilewright.data.stages.chat.chat_settings import TEXT
from tilewright.data.stages.copies import sketches
from tilewright.data.stages.copies.exact_copies import DROP, doc_of, drops_of, exact_ranges, row_of, shard_of
from tilewright.data.stages.copies.minhash import components, shingle_hashes
from tilewright.data.stages.copies.sketches import PAIR, joined, merits, surviving_texts
from tilewright.data.stages.stage_order import before_copies

CLUSTER_SIMILARITY = 0.5
"""From which records are never divided between training and held-out text, and thereby the least threshold."""

INDEX = np.dtype([("doc", "<u8"), ("first", "<u8"), ("count", "<u4"), ("merit", "<u4")])
VERIFIED = np.dtype([("a", "<u8"), ("b", "<u8"), ("similarity", "<f4")])
CLUSTER = np.dtype([("doc", "<u8"), ("cluster", "<u8")])
_SAID = "said.npy"
_HELD = 512  # records whose shingles are in memory while pairs are verified


def candidate_shingles(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Path,
    kept: Path,
    exact: Sequence[Path],
    pairs: Sequence[Path],
    by_score: bool,
    format: str,
) -> Mapping[str, Any]:
    """Shingles of candidates for near-copies: write those, sorted, of a shard's records that are in any candidate pair,
    and where those of each are; of conversations a hash of what is said in each, too."""
    wanted, drops = _docs_in(pairs, index), row_of(drops_of(exact, index)["doc"])
    entries: list[tuple[int, int, int, int]] = []
    said: list[int] = []
    first = 0
    with NpyWriter(folder / "shingles.npy", np.dtype("<u8")) as out:
        for rows, texts, _ in surviving_texts(records, kept, drops) if len(wanted) else ():
            docs = doc_of(index, rows)
            at = np.flatnonzero(np.isin(docs, wanted)).tolist()
            if not at:
                continue
            data, starts, sizes = joined([texts[i] for i in at])
            hashes, counts = shingle_hashes(data, starts)
            ends = np.cumsum(counts)
            merit = merits(kept, rows[at], sizes, by_score=by_score)
            for number, i in enumerate(at):
                own = np.unique(hashes[ends[number] - counts[number] : ends[number]])
                out.append(own)
                entries.append((int(docs[i]), first, len(own), int(merit[number])))
                first += len(own)
            said += [xxhash.xxh3_64_intdigest(texts[i].encode()) for i in at] if format != TEXT else []
    if format != TEXT:
        np.save(folder / _SAID, np.array(said, np.uint64))
    np.save(folder / "index.npy", np.array(entries, INDEX))
    return {"records": len(entries)}


def _docs_in(pairs: Sequence[Path], shard: int) -> np.ndarray:
    """Documents of a shard that are in any pair of near-copies, sorted."""
    found = [np.zeros(0, np.uint64)]
    for folder in pairs:
        rows = np.load(folder / "pairs.npy", allow_pickle=False)
        for name in ("a", "b"):
            found.append(np.unique(rows[name][shard_of(rows[name]) == shard]))
    return np.unique(np.concatenate(found))


def verify_pairs(
    index: int, settings: SimpleNamespace, folder: Path, *, pairs: Sequence[Path], shingles: Sequence[Path]
) -> Mapping[str, Any]:
    """Verify pairs of near-copies: write those of range `index` that are as similar as members of a cluster, with their
    similarity."""
    rows = np.unique(read_range([one / "pairs" for one in pairs], index, PAIR)[["a", "b"]])

    @lru_cache(maxsize=64)
    def where(shard: int) -> np.ndarray:
        return np.load(shingles[shard] / "index.npy", allow_pickle=False)

    @lru_cache(maxsize=_HELD)
    def of(doc: int) -> np.ndarray:
        shard = doc >> 40
        table = where(shard)
        entry = table[np.searchsorted(table["doc"], np.uint64(doc))]
        first = int(entry["first"])
        return read_rows(shingles[shard] / "shingles.npy", first, first + int(entry["count"]))

    similarity = np.array([jaccard(of(a), of(b)) for a, b in rows.tolist()], np.float32)
    near = np.flatnonzero(similarity >= CLUSTER_SIMILARITY)
    found = np.zeros(len(near), VERIFIED)
    found["a"], found["b"], found["similarity"] = rows["a"][near], rows["b"][near], similarity[near]
    np.save(folder / "verified.npy", found)
    return {"pairs": len(rows), "similar": len(found)}


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard similarity of near-copies: of two sorted arrays without duplicates.

    Example:
        >>> jaccard(np.array([1, 2, 3]), np.array([2, 3, 4]))
        0.5
    """
    if len(a) > len(b):
        a, b = b, a
    at = np.searchsorted(b, a)
    both = int((b[np.minimum(at, len(b) - 1)] == a).sum()) if len(b) else 0
    return both / max(1, len(a) + len(b) - both)


def resolve(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    verified: Sequence[Path],
    shingles: Sequence[Path],
    format: str,
) -> Mapping[str, Any]:
    """Resolve near-copies: write which go (`drops.npy`), and the cluster of each record that has one (`clusters.npy`).

    Args:
        index: 0.
        settings: duplicates.
        folder: gets the files, both sorted by record.
        verified: folders of the pairs.
        shingles: folders of all shards, which know the merit of each record.
        format: of what the records are.
    """
    duplicates = settings.duplicates
    pairs = np.concatenate(
        [np.zeros(0, VERIFIED), *(np.load(one / "verified.npy", allow_pickle=False) for one in verified)]
    )
    pairs = np.sort(pairs, order=("a", "b"))
    docs = np.unique(np.concatenate([pairs["a"], pairs["b"]]))
    a, b = np.searchsorted(docs, pairs["a"]), np.searchsorted(docs, pairs["b"])
    clusters = np.zeros(len(docs), CLUSTER)
    clusters["doc"], clusters["cluster"] = docs, docs[components(len(docs), a, b)]
    np.save(folder / "clusters.npy", clusters)
    drops = np.zeros(0, DROP)
    if duplicates.near:
        close = pairs["similarity"] >= np.float32(duplicates.threshold)
        if format != TEXT:
            said = _of_each(docs, shingles, lambda shard, table: np.load(shard / _SAID, allow_pickle=False))
            close &= said[a] != said[b]
        merit = np.zeros(len(docs), np.int64)
        if duplicates.keep != "first":
            merit = _of_each(docs, shingles, lambda shard, table: table["merit"]).astype(np.int64)
        order = np.lexsort((docs, -merit))
        gone = list(greedy(order, a[close], b[close], pairs["similarity"][close]))
        drops = np.array([(docs[i], docs[j], s) for i, j, s in gone], DROP)
    np.save(folder / "drops.npy", np.sort(drops, order="doc"))
    return {"near_duplicates": len(drops), "clusters": len(np.unique(clusters["cluster"]))}


def _of_each(
    docs: np.ndarray, shingles: Sequence[Path], column: Callable[[Path, np.ndarray], np.ndarray]
) -> np.ndarray:
    """A column of each record among near-copies, uint64, by the folder of its shard and the index of that."""
    found = np.zeros(len(docs), np.uint64)
    shards = shard_of(docs)
    for shard in np.unique(shards).tolist():
        here = np.flatnonzero(shards == shard)
        table = np.load(shingles[shard] / "index.npy", allow_pickle=False)
        found[here] = column(shingles[shard], table)[np.searchsorted(table["doc"], docs[here])]
    return found


def greedy(order: np.ndarray, a: np.ndarray, b: np.ndarray, similarity: np.ndarray) -> Iterator[tuple[int, int, float]]:
    """Greedy choice among near-copies: records that go because one like them stays.

    Args:
        order: all records, in the order in which they are taken.
        a, b, similarity: pairs of records that resemble each other, and how much.

    Yields:
        (record that goes, record that stays, similarity).

    Example:
        >>> list(greedy(np.array([0, 1, 2]), np.array([0, 1]), np.array([1, 2]), np.array([0.9, 0.8])))
        [(1, 0, 0.9)]
    """
    left, right = np.concatenate([a, b]), np.concatenate([b, a])
    both = np.concatenate([similarity, similarity])
    by_left = np.argsort(left, kind="stable")
    right, both = right[by_left], both[by_left]
    bounds = np.searchsorted(left[by_left], np.arange(len(order) + 1))
    is_gone = np.zeros(len(order), bool)
    stays = np.zeros(len(order), bool)
    for i in order.tolist():
        if is_gone[i]:
            continue
        stays[i] = True
        for k in range(bounds[i], bounds[i + 1]):
            j = int(right[k])
            if not is_gone[j] and not stays[j]:
                is_gone[j] = True
                yield j, i, float(both[k])


SHINGLES = BuildStage(
    *("shingles", "reading candidates", 3, per_shard, candidate_shingles),
    inputs={
        "records": Same("repair"),
        "kept": Same(before_copies),
        "exact": Every("exact", exact_ranges),
        "pairs": Every("pairs", sketches.band_ranges),
        "by_score": FoundValue(sketches.by_score),
        "format": AddedSetting("chat.format"),
    },
)
VERIFY = BuildStage(
    *("verify", "verifying near-copies", 1, sketches.pair_ranges, verify_pairs),
    inputs={"pairs": Every("pairs", sketches.band_ranges), "shingles": Every("shingles")},
)
NEAR = BuildStage(
    *("near", "choosing which copies stay", 1, one_unit, resolve, ("duplicates",)),
    {
        "verified": Every("verify", sketches.pair_ranges),
        "shingles": Every("shingles"),
        "format": AddedSetting("chat.format"),
    },
)

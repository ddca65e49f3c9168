"""Which records stay by their scores: a threshold, the best share of a domain, or a sample by rank.

A score is rounded when it is made, so the distribution of a domain's scores is exact as counts of few values, however
many records there are. The rank of a record is the share of its domain's records below it, from 0 to 1; records of one
score share their range of ranks by a hash of their text. So all of it depends on the texts alone: not on the order of
files, on shards or on processes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.data.common.hashing import hash64
from tilewright.data.common.npy_writer import NpyWriter
from tilewright.data.common.record_filter import DropReason
from tilewright.data.engine.record_tables import REJECTS, TableWriter, batches, rows
from tilewright.data.stages.copies.sketches import surviving_texts
from tilewright.data.stages.kept_records import KEPT, reject_of
from tilewright.data.stages.scores.reference_texts import digests_of

Scorer = Callable[[Sequence[bytes], np.ndarray], np.ndarray]
"""Scores, float64 [texts], of UTF-8 texts and their digests (uint64)."""
_BATCH_BYTES = 1 << 20
_TIES = 0x7A2B
NUM_BINS = 32


@dataclass(frozen=True)
class ScoreKind:
    """A score: its column in `kept.parquet`, the stage that drops by it, and the range that its histogram shows."""

    column: str
    stage: str
    low: float
    high: float

    @property
    def bin_starts(self) -> list[float]:
        """The start of each bin of a score's histogram. The first and the last bin are open."""
        return [self.low + (self.high - self.low) * k / NUM_BINS for k in range(NUM_BINS)]


QUALITY = ScoreKind("quality", "quality", 0.0, 1.0)
CONTRAST = ScoreKind("contrast", "noise", -4.0, 4.0)
BITS = ScoreKind("bits_per_byte", "sample", 0.0, 8.0)
KINDS = (QUALITY, CONTRAST, BITS)


@dataclass(frozen=True)
class ScoreDecision:
    """Which records stay, and the rule, value and threshold of those that do not. Arrays are bool or text [records]."""

    stays: np.ndarray
    rule: str
    values: Sequence[str | float]
    thresholds: Sequence[str | float]

    def reason(self, number: int) -> DropReason:
        """Why the record of this number is not kept by its score."""
        return DropReason(self.rule, self.values[number], self.thresholds[number])


Judge = Callable[[str, np.ndarray, np.ndarray], ScoreDecision]
"""The judgement on records of a domain by their scores (float64) and digests (uint64)."""


def score_records(
    repaired: Path, kept: Path, scorer: Scorer, domains: Sequence[str], folder: Path
) -> Mapping[str, Any]:
    """Write `scores.npy`: the score of each row of `kept.parquet`, float32; NaN for rows that are no text or not asked
    for."""
    digests = digests_of(kept)
    at = num = num_bytes = 0
    with NpyWriter(folder / "scores.npy", np.dtype("<f4")) as out:
        for found, texts, others in surviving_texts(repaired, kept, np.zeros(0, np.int64), ("modality", "domain")):
            values = np.full(len(found), np.nan)
            asked = zip(texts, others["modality"], others["domain"], strict=True)
            wanted = [i for i, (t, m, d) in enumerate(asked) if t and m == "text" and (not domains or d in domains)]
            for part in _parts(wanted, texts):
                data = [texts[i].encode() for i in part]
                values[part] = scorer(data, digests[at + np.array(part)])
                num_bytes += sum(map(len, data))
            out.append(values)
            at, num = at + len(found), num + len(wanted)
    return {"scored": num, "scored_bytes": num_bytes}


def _parts(wanted: list[int], texts: list[str]) -> list[list[int]]:
    """Parts of texts that are scored together, to keep the best."""
    parts: list[list[int]] = []
    size = 0
    for i in wanted:
        if not parts or size > _BATCH_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(i)
        size += len(texts[i])
    return parts


def count_scores(shards: Sequence[tuple[str, Path]], folder: Path) -> Mapping[str, Any]:
    """Count scores to keep records by: write `counts.json`: the sorted scores of each domain and how often each occurs.

    Args:
        shards: domain and folder with `scores.npy` of each.
        folder: gets the file.
    """
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for domain, shard in shards:
        values = np.load(shard / "scores.npy", allow_pickle=False)
        values, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        if domain in found:
            values, inverse = np.unique(np.concatenate([found[domain][0], values]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([found[domain][1], counts])).astype(np.int64)
        found[domain] = values, counts
    plain = {domain: [v.astype(float).tolist(), c.tolist()] for domain, (v, c) in sorted(found.items()) if len(v)}
    (folder / "counts.json").write_text(json.dumps(plain, sort_keys=True))
    return {"scored": int(sum(counts.sum() for _, counts in found.values()))}


@dataclass(frozen=True)
class ScoreRanks:
    """The scores of all records of each domain, as `count_scores` wrote them."""

    domains: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def load(cls, folder: Path) -> "ScoreRanks":
        plain = json.loads((folder / "counts.json").read_bytes())
        return cls({domain: (np.array(v, np.float32), np.array(c, np.int64)) for domain, (v, c) in plain.items()})

    def of(self, domain: str, scores: np.ndarray, digests: np.ndarray) -> np.ndarray:
        """The rank of each record's score within its domain, float64 in [0, 1), to keep it by."""
        values, counts = self.domains[domain]
        at = np.searchsorted(values, scores.astype(np.float32))
        below = np.cumsum(counts) - counts
        return (below[at] + uniform(digests, _TIES) * counts[at]) / counts.sum()

    def value_at(self, domain: str, rank: float) -> float:
        """The score at a rank, to keep records by."""
        values, counts = self.domains[domain]
        return float(values[min(int(np.searchsorted(np.cumsum(counts), rank * counts.sum())), len(values) - 1)])


def uniform(digests: np.ndarray, *keys: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for records' digests, to keep a sample by score, by a hash of each and the keys;
    float64."""
    return (hash64(*keys, digests) >> np.uint64(11)) / 2.0**53


def choose_records(
    repaired: Path, kept: Path, scores: Path, kind: ScoreKind, judge: Judge, folder: Path
) -> Mapping[str, Any]:
    """Keep records by their scores: write the shard's `kept.parquet` with the score of each record that stays, rejects,
    and a histogram.

    Args:
        repaired: folder of the shard's text.
        kept: folder of the side table of the stage before.
        scores: folder with its `scores.npy`.
        kind: of score.
        judge: says which stay. Records without a score stay.
        folder: gets the files.
    """
    domain = next((batch["domain"][0] for _, batch in batches(repaired / "records.parquet", ("domain",))), "")
    found = np.load(scores / "scores.npy", allow_pickle=False).astype(np.float64)
    # 1. The verdict. Records without a score are not judged, and stay.
    has = np.flatnonzero(~np.isnan(found))
    stays = np.ones(len(found), bool)
    verdict = judge(domain, found[has], digests_of(kept)[has]) if len(has) else None
    why: dict[int, int] = {}
    gone: dict[int, int] = {}
    if verdict is not None:
        stays[has] = verdict.stays
        why = {int(has[i]): int(i) for i in np.flatnonzero(~verdict.stays)}
    # 2. The side table of what stays, with its score.
    num_bytes = 0
    with TableWriter(folder / "kept.parquet", KEPT) as out:
        for number, row in enumerate(rows(kept / "kept.parquet")):
            if stays[number]:
                score = None if np.isnan(found[number]) else found[number]
                out.append(row | {kind.column: score})
                num_bytes += row["bytes"]
            else:
                gone[row["row"]] = why[number]
        num_kept = out.num_rows
    # 3. Rejects with their text, out of the repaired records; the side table has none.
    with TableWriter(folder / "rejects.parquet", REJECTS) as rejects:
        for first, batch in batches(repaired / "records.parquet", ("id", "text", "domain", "path", "part")):
            for row, values in enumerate(zip(*batch.values(), strict=True), first) if gone else ():
                if row in gone and verdict is not None:
                    reason = verdict.reason(gone[row])
                    rejects.append(reject_of(dict(zip(batch, values, strict=True)), kind.stage, reason))
    # 4. A histogram over all scores, kept or not: the page shows where the threshold cuts.
    width = (kind.high - kind.low) / NUM_BINS
    bins = np.clip((found[has] - kind.low) / width, 0, NUM_BINS - 1).astype(np.int64)
    counts = {f"{domain}\0{kind.column}": np.bincount(bins, minlength=NUM_BINS).tolist()} if len(has) else {}
    (folder / "histograms.json").write_text(json.dumps(counts, sort_keys=True))
    return {"records": num_kept, "bytes": num_bytes, "rejects": len(gone)}

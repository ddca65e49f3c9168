"""Which records are held out: whole clusters of near-copies, some of every domain (`corpus.holdout`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.core.errors import DataError
from tilewright.data.build.stages.copies.exact import doc_of, row_of, shard_of
from tilewright.data.build.tables import batches
from tilewright.data.corpus.holdout import choose_holdout

TRAIN, HELD, DROPPED = 0, 1, 2


@dataclass(frozen=True)
class _Documents:
    """All records that stay, as `choose_holdout` wants them."""

    domains: tuple[str, ...]
    docs: np.ndarray
    domain_of: np.ndarray
    lengths: np.ndarray
    repaired: list[Path]

    def __len__(self) -> int:
        return len(self.docs)

    def data_of(self, index: int) -> bytes:
        shard, row = int(shard_of(self.docs[index])), int(row_of(self.docs[index]))
        for first, batch in batches(self.repaired[shard] / "records.parquet", ("text",)):
            if first <= row < first + len(batch["text"]):
                return batch["text"][row - first].encode()
        raise AssertionError(f"no row {row} in shard {shard}")


def split_records(
    kept: list[Path],
    repaired: list[Path],
    domain_of_shard: list[str],
    clusters: Path,
    holdout: float,
    seed: int,
    folder: Path,
) -> Mapping[str, Any]:
    """Write where each record goes: `NNNNN.npy` per shard (uint8, one per row of its side table) and `split.json`.

    `split.json` has `cut` (record -> byte where its held-out tail begins), domains that are dropped, and notes.

    Raises:
        DataError: too little text for both parts.
    """
    domains = tuple(sorted(set(domain_of_shard)))
    docs, domain_of, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for shard, one in enumerate(kept):
        for _, batch in batches(one / "kept.parquet", ("row", "bytes")):
            docs.append(doc_of(shard, np.array(batch["row"], np.int64)))
            lengths.append(np.array(batch["bytes"], np.int64))
            domain_of.append(np.full(len(batch["row"]), domains.index(domain_of_shard[shard]), np.int32))
    every = np.concatenate(docs)
    found = _Documents(domains, every, np.concatenate(domain_of), np.concatenate(lengths), repaired)
    if not len(found):
        raise _too_little(0)
    split = choose_holdout(found, _clusters(every, clusters), holdout, seed)
    where = np.where(split.held, HELD, TRAIN).astype(np.uint8)
    where[np.isin(found.domain_of, split.dropped)] = DROPPED
    if not (where == TRAIN).any() or not ((where == HELD).any() or split.cut):
        raise _too_little(len(found))
    shards = shard_of(every)
    for shard in range(len(kept)):
        first, stop = np.searchsorted(shards, [shard, shard + 1])
        np.save(folder / f"{shard:05}.npy", where[first:stop])
    notes = {
        "cut": {str(int(every[i])): at for i, at in sorted(split.cut.items())},
        "dropped": sorted(domains[i] for i in split.dropped),
        "notes": split.notes,
    }
    (folder / "split.json").write_text(json.dumps(notes, indent=1, sort_keys=True))
    return {"train": int((where == TRAIN).sum()), "holdout": int((where == HELD).sum()) + len(split.cut)}


def _clusters(docs: np.ndarray, path: Path) -> np.ndarray:
    """Cluster of each record; one without a near-copy is its own."""
    known = np.load(path / "clusters.npy", allow_pickle=False)
    cluster = docs.copy()
    at = np.searchsorted(docs, known["doc"])
    here = (at < len(docs)) & (docs[np.minimum(at, len(docs) - 1)] == known["doc"])
    cluster[at[here]] = known["cluster"][here]
    return cluster.astype(np.int64)


def _too_little(num: int) -> DataError:
    return DataError(
        "Too little text for a training and a held-out part",
        where="data build",
        got=f"{num} records that keep to the rules and are no copies",
        need="two different records, or one of a few hundred bytes",
        try_="fewer or weaker rules; tilewright data inspect shows what was dropped, and why",
    )

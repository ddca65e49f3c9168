"""Rows of one length from encoded text: both splits of a corpus packed, domain by domain. The second cache entry.

Imports no torch: a process of its own that only does this starts at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tilewright.core.atomic_io import hash_file
from tilewright.data.batches.pack_documents import Packing, alone, pack
from tilewright.data.batches.token_rows import SPLITS
from tilewright.data.common.progress import ProgressBar

INDEX = "shards.json"
"""In a corpus whose training tokens are shards at an address: their index. Each shard is packed by itself."""
Group = tuple[str, np.ndarray]
"""A domain, and its documents that are packed together."""
RowRanges = dict[str, list[int]]
"""The first row of each domain, and the one behind its last."""


def build_rows(
    folder: Path,
    corpus: Path,
    task: str,
    seq_len: int,
    only: tuple[str, ...] = (),
    rows: str = "packed",
    *,
    progress: ProgressBar,
) -> None:
    """Build rows of one length: pack both splits of an encoded `corpus`, domain by domain, and write the tables.

    Args:
        folder: gets the files.
        corpus: folder of encoded text.
        task: causal_lm or masked_lm.
        seq_len: positions in a row.
        only: domains that are packed; empty: all.
        rows: "packed", or "documents" for one document in each row.
        progress: shows a phase.
    """
    progress.phase("packing")
    table = pq.read_table(corpus / "documents.parquet", columns=["split", "domain", "length"])
    digest = xxhash.xxh3_128(f"{task}\0{seq_len}".encode())
    ranges: dict[str, RowRanges] = {}
    utilisation, shard_rows = 1.0, dict[str, list[int]]()
    for split in SPLITS:
        ours = pc.equal(table["split"], split)  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        here = table.filter(ours)
        lengths = here["length"].to_numpy()
        domain_of = np.array(here["domain"].to_pylist())
        place = pack if rows == "packed" else alone
        # 1. Documents of a build are packed shard by shard, so that a row needs one shard; others by domain.
        in_shards = split == "train" and (corpus / INDEX).exists()
        groups = _groups_of_shards(corpus / INDEX) if in_shards else groups_of_domains(domain_of)
        groups = [(domain, at) for domain, at in groups if not only or domain in only]
        starts = np.cumsum(lengths) - lengths
        # 2. Where each document begins in the stream; with next-token labels its last token is no input.
        packing, ranges[split], group_rows = pack_groups(
            place, starts, lengths - (task == "causal_lm"), groups, seq_len
        )
        if in_shards:
            shard_rows = group_rows
        # 3. The fingerprint covers all that rows are read from: tokens, ranges, masks of trained tokens, tables.
        source = corpus / (INDEX if in_shards else f"{split}.npy")
        digest.update((hash_file(source) + json.dumps(ranges[split])).encode())
        if (corpus / f"{split}.trained.npy").exists():
            digest.update(hash_file(corpus / f"{split}.trained.npy").encode())
        save_packing(folder, split, packing, digest)
        if split == "train":
            utilisation = packing.utilisation(seq_len)
    summary = json.loads((corpus / "summary.json").read_bytes())
    # 4. What the summary says of this packing and not of the corpus.
    if rows == "documents":
        summary["notes"] = [
            *summary.get("notes", ()),
            *_split_note(table["length"].to_numpy() - (task == "causal_lm"), seq_len),
        ]
    if only:
        summary["domains"] = {name: counts for name, counts in summary["domains"].items() if name in only}
    summary["utilisation"] = round(utilisation, 5)
    more = {"shard_rows": shard_rows} if shard_rows else {}
    write_meta(folder, digest, ranges, summary, task=task, seq_len=seq_len, rows_of=rows, **more)


def _split_note(lengths: np.ndarray, seq_len: int) -> list[str]:
    """A note on documents with more than `seq_len` positions, when rows are built."""
    longer = lengths[lengths > seq_len]
    if not len(longer):
        return []
    pieces = int((-(-longer // seq_len)).sum())
    return [
        f"{len(longer):,} documents are longer than data.seq_len = {seq_len} (the longest has {longer.max():,}): "
        f"they are split into {pieces:,} pieces, which do not see each other"
    ]


def groups_of_domains(domain_of: np.ndarray, fits: np.ndarray | bool = True) -> list[Group]:
    """Group the documents that fit into rows (bool [documents]) by domain; a domain without any has an empty group."""
    names = sorted(set(domain_of.tolist()))
    return [(domain, np.flatnonzero((domain_of == domain) & fits)) for domain in names]


def _groups_of_shards(index: Path) -> list[Group]:
    """The documents of each shard to build rows of, which are behind each other."""
    groups, start = [], 0
    for shard in json.loads(index.read_bytes())["shards"]:
        groups.append((shard["domain"], np.arange(start, start + shard["documents"])))
        start += shard["documents"]
    return groups


def pack_groups(
    place: Callable[[np.ndarray, np.ndarray, int], Packing],
    starts: np.ndarray,
    lengths: np.ndarray,
    groups: list[Group],
    seq_len: int,
) -> tuple[Packing, RowRanges, dict[str, list[int]]]:
    """Pack all domains, each into rows of its own; returns the row range of each domain, and the rows of its groups.

    Args:
        place: packs the documents of a group: `pack`, or `alone`.
        starts: int64 [documents], stream position of each document.
        lengths: int64 [documents], positions of it that are packed: of N in the stream N - 1 pairs of input and next
            token, or N tokens where nothing is shifted.
        groups: documents by domain.
        seq_len: positions in a row.
    """
    packings, row = [], 0
    ranges: RowRanges = {}
    counts: dict[str, list[int]] = {}
    for domain, here in groups:
        packings.append(place(starts[here], lengths[here], seq_len))
        stop = row + packings[-1].num_rows
        ranges[domain] = [ranges.get(domain, [row])[0], stop]
        counts.setdefault(domain, []).append(packings[-1].num_rows)
        row = stop
    if not packings:
        return pack(np.zeros(0, np.int64), np.zeros(0, np.int64), seq_len), ranges, counts
    pieces = np.concatenate([np.diff(p.first_R) for p in packings])
    first = np.append(0, np.cumsum(pieces))
    starts_P = np.concatenate([p.starts_P for p in packings])
    return Packing(starts_P, np.concatenate([p.lengths_P for p in packings]), first), ranges, counts


def save_packing(folder: Path, split: str, packing: Packing, digest: xxhash.xxh3_128) -> None:
    """Save the packing of built rows: write the tables of a split into `folder`; `digest` is updated with them."""
    for name, array in (("starts", packing.starts_P), ("lengths", packing.lengths_P), ("first", packing.first_R)):
        digest.update(array.tobytes())
        np.save(folder / f"{split}.{name}.npy", array)


def write_meta(
    folder: Path,
    digest: xxhash.xxh3_128,
    ranges: dict[str, RowRanges],
    summary: dict[str, Any],
    **told: object,
) -> None:
    """Write the meta file of built rows: what the packed rows in `folder` mean.

    Args:
        folder: has their tables.
        digest: of their content, of which the fingerprint is made.
        ranges: of rows, by split.
        summary: of the text; its domains get their numbers of rows.
        told: what else is said: the task, positions in a row.
    """
    for split, name in (("train", "rows"), ("holdout", "holdout_rows")):
        for domain, counts in summary["domains"].items():
            first, stop = ranges[split].get(domain, (0, 0))
            counts[name] = stop - first
    meta = {"fingerprint": digest.hexdigest(), **told, "rows": ranges, "summary": summary}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False))

"""Rows of one length from encoded conversations: packed without cutting one in two. The second cache entry.

A conversation longer than a row loses its end, which is counted; one whose answers begin behind the row's end is set
aside. Several conversations share a row where they fit, best fit first; of preferences a row is one pair.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tilewright.core.errors import DataError
from tilewright.data.batches.pack import Packing, pack
from tilewright.data.common.cache import file_digest
from tilewright.data.common.progress import ProgressBar
from tilewright.data.corpus.build import SPLITS

BEHIND = "answer begins behind data.seq_len"
_NUM_LONGEST = 5


def pack_chat(folder: Path, corpus: Path, pairs: bool, seq_len: int, *, progress: ProgressBar) -> None:
    """Pack both splits of `corpus`, domain by domain, and write the tables and their meaning.

    Raises:
        DataError: no conversation fits.
    """
    progress.phase("packing")
    table = pq.read_table(corpus / "documents.parquet")
    summary = json.loads((corpus / "summary.json").read_bytes())
    digest = xxhash.xxh3_128(f"chat\0{pairs}\0{seq_len}".encode())
    ranges: dict[str, dict[str, list[int]]] = {}
    facts = summary["chat"] | {"seq_len": seq_len, "truncated": 0, "truncated_tokens": 0}
    lost = []
    for split in SPLITS:
        here = table.filter(pc.equal(table["split"], split))
        column = {name: here[name].to_numpy() for name in ("length", "first", "document")}
        starts = np.cumsum(column["length"]) - column["length"]
        fits = column["first"] <= seq_len
        if pairs:
            fits = np.repeat(fits.reshape(-1, 2).all(1), 2)
        domain_of = np.array(here["domain"].to_pylist())
        packing, ranges[split] = _pack_domains(starts, column["length"] - 1, domain_of, fits, seq_len, pairs)
        cut = fits & (column["length"] - 1 > seq_len)
        facts["truncated"] += int(cut.sum())
        facts["truncated_tokens"] += int((column["length"][cut] - 1 - seq_len).sum())
        lost.append(here.filter(~fits))
        for part in (f"{split}.npy", f"{split}.trained.npy"):
            digest.update(file_digest(corpus / part).encode())
        digest.update(json.dumps(ranges[split]).encode())
        for name, array in (("starts", packing.starts_P), ("lengths", packing.lengths_P), ("first", packing.first_R)):
            digest.update(array.tobytes())
            np.save(folder / f"{split}.{name}.npy", array)
        if split == "train":
            summary["utilisation"] = round(packing.utilisation(seq_len * (1 + pairs)), 5)
            order = np.argsort(-column["length"], kind="stable")[:_NUM_LONGEST].tolist()
            rows = here.take(order)
            facts["longest"] = rows.select(["name", "length", "trained"]).to_pylist()
    _set_aside(summary, lost)
    trained = [domain for domain, (first, stop) in ranges["train"].items() if stop > first]
    if not trained:
        raise DataError(
            "No conversation fits into a row",
            got=f"data.seq_len = {seq_len}; all answers begin later",
            need="rows that reach into the answers",
            try_=f"data.seq_len = {int(table['first'].to_numpy().min()) * 2}",
            where="data.seq_len",
        )
    for split, name in (("train", "rows"), ("holdout", "holdout_rows")):
        if split == "train":
            ranges[split] = {domain: ranges[split][domain] for domain in trained}
        for domain in summary["domains"]:
            first, stop = ranges[split].get(domain, (0, 0))
            summary["domains"][domain][name] = stop - first
    summary["chat"] = facts
    meta = {
        "fingerprint": digest.hexdigest(),
        "task": "causal_lm",
        "format": "preferences" if pairs else "chat",
        "seq_len": seq_len,
        "rows": ranges,
        "summary": summary,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, ensure_ascii=False))


def _pack_domains(
    starts: np.ndarray, lengths: np.ndarray, domain_of: np.ndarray, fits: np.ndarray, seq_len: int, pairs: bool
) -> tuple[Packing, dict[str, list[int]]]:
    """One packing of all domains, each in rows of its own, and the row range of each. A pair is a row of two pieces."""
    lengths = np.minimum(lengths, seq_len)
    pieces_s, pieces_l, counts, ranges, row = [], [], [], {}, 0
    for domain in sorted(set(domain_of.tolist())):
        here = np.flatnonzero((domain_of == domain) & fits)
        if pairs:
            mine = Packing(starts[here], lengths[here].astype(np.int32), np.arange(0, len(here) + 1, 2))
        else:
            mine = pack(starts[here], lengths[here], seq_len)
        pieces_s.append(mine.starts_P)
        pieces_l.append(mine.lengths_P)
        counts.append(np.diff(mine.first_R))
        ranges[domain] = [row, row + mine.num_rows]
        row += mine.num_rows
    first = np.append(0, np.cumsum(np.concatenate(counts))) if counts else np.zeros(1, np.int64)
    empty = np.zeros(0, np.int64)
    return Packing(
        np.concatenate([empty, *pieces_s]).astype(np.int64),
        np.concatenate([empty, *pieces_l]).astype(np.int32),
        first.astype(np.int64),
    ), ranges


def _set_aside(summary: dict[str, Any], lost: list[Any]) -> None:
    """Move conversations from used to refused in the account of a summary."""
    names: dict[int, tuple[str, int]] = {}
    for table in lost:
        for row in table.select(["document", "name", "bytes"]).to_pylist():
            names[row["document"]] = (row["name"], row["bytes"])
    if not names:
        return
    size = sum(num_bytes for _, num_bytes in names.values())
    for what, amount in (("documents", len(names)), ("text_bytes", size)):
        summary["read"][what]["used"] -= amount
        summary["read"][what]["refused"] += amount
    examples = ", ".join(name for name, _ in list(names.values())[:3])
    entry = {"files": 0, "file_bytes": 0, "documents": len(names), "text_bytes": size, "examples": examples}
    summary["refused"][BEHIND] = entry

"""Rows of one length from encoded conversations: packed without cutting one in two. The second cache entry.

A rendering longer than a row loses its end, which is counted; one whose answers begin behind the row's end is set
aside, and a pair whose answers are then equal. Of a conversation with several renderings others may be left: those that
are lost are counted as renderings, and the conversation as refused where all are. Several renderings share a row where
they fit, best fit first; of preferences a row is one pair.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tilewright.core.atomic_io import hash_file
from tilewright.core.errors import DataError
from tilewright.data.batches.build_rows import RowRanges, groups_of_domains, pack_groups, save_packing, write_meta
from tilewright.data.batches.pack_documents import Packing, alone, pack
from tilewright.data.batches.token_rows import SPLITS
from tilewright.data.common.progress import ProgressBar

BEHIND = "answer begins behind data.seq_len"
EQUAL = "chosen and rejected are equal up to data.seq_len"
_NUM_LONGEST = 5


def pack_chat(
    folder: Path,
    corpus: Path,
    pairs: bool,
    seq_len: int,
    rows: str = "packed",
    only: tuple[str, ...] = (),
    *,
    progress: ProgressBar,
) -> None:
    """Pack conversations of both splits of `corpus` into rows without cutting one, and write the tables.

    Args:
        folder: gets the files.
        corpus: folder of encoded conversations.
        pairs: whether they are preferences.
        seq_len: positions in a row.
        rows: "packed", or "documents" for one rendering in each row.
        only: domains that are packed; empty: all.
        progress: shows a phase.

    Raises:
        DataError: no conversation fits.
    """
    progress.phase("packing")
    table = pq.read_table(corpus / "documents.parquet")
    summary = json.loads((corpus / "summary.json").read_bytes())
    digest = xxhash.xxh3_128(f"chat\0{pairs}\0{seq_len}".encode())
    ranges: dict[str, RowRanges] = {}
    facts = summary["chat"] | {"seq_len": seq_len, "truncated": 0, "truncated_tokens": 0}
    facts["lost"] = {}
    for split in SPLITS:
        ours = pc.equal(table["split"], split)  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        here = table.filter(ours)
        column = {name: here[name].to_numpy() for name in ("length", "first", "document")}
        starts = np.cumsum(column["length"]) - column["length"]
        reason = np.where(column["first"] <= seq_len, "", BEHIND)
        if pairs:
            behind = np.repeat((reason != "").reshape(-1, 2).any(1), 2)
            tokens = np.load(corpus / f"{split}.npy", mmap_mode="r", allow_pickle=False)
            equal = np.repeat(_equal(tokens, column["length"], seq_len), 2)
            reason = np.where(behind, BEHIND, np.where(equal, EQUAL, ""))
        fits = reason == ""
        domain_of = np.array(here["domain"].to_pylist())
        place = _in_pairs if pairs else pack if rows == "packed" else alone
        kept = np.minimum(column["length"] - 1, seq_len)
        groups = [(domain, at) for domain, at in groups_of_domains(domain_of, fits) if not only or domain in only]
        packing, ranges[split], _ = pack_groups(place, starts, kept, groups, seq_len)
        cut = fits & (column["length"] - 1 > seq_len)
        facts["truncated"] += int(cut.sum())
        facts["truncated_tokens"] += int((column["length"][cut] - 1 - seq_len).sum())
        own = split == "holdout" and "validation" in summary  # which has an account of its own
        _set_aside(summary["validation"] if own else summary, here, reason, facts["lost"])
        for part in (f"{split}.npy", f"{split}.trained.npy"):
            digest.update(hash_file(corpus / part).encode())
        digest.update(json.dumps(ranges[split]).encode())
        save_packing(folder, split, packing, digest)
        if split == "train":
            summary["utilisation"] = round(packing.utilisation(seq_len * (1 + pairs)), 5)
            order = np.argsort(-column["length"], kind="stable")[:_NUM_LONGEST].tolist()
            longest = here.take(order)
            facts["longest"] = longest.select(["name", "length", "trained"]).to_pylist()
    trained = [domain for domain, (first, stop) in ranges["train"].items() if stop > first]
    if not trained:
        raise DataError(
            "No conversation fits into a row",
            got=f"data.seq_len = {seq_len}; all answers begin later, or differ later",
            need="rows that reach into the answers",
            try_=f"data.seq_len = {max(seq_len, int(table['first'].to_numpy().min())) * 2}",
            where="data.seq_len",
        )
    ranges["train"] = {domain: ranges["train"][domain] for domain in trained}
    summary["chat"] = facts
    if only:
        summary["domains"] = {name: counts for name, counts in summary["domains"].items() if name in only}
    kind = {"task": "causal_lm", "format": "preferences" if pairs else "chat"}
    write_meta(folder, digest, ranges, summary, **kind, seq_len=seq_len, rows_of=rows)


def _in_pairs(starts: np.ndarray, lengths: np.ndarray, seq_len: int) -> Packing:
    """Pack pairs of conversations: two pieces in each row."""
    return Packing(starts, lengths.astype(np.int32), np.arange(0, len(starts) + 1, 2))


def _equal(ids: np.ndarray, length_N: np.ndarray, seq_len: int) -> np.ndarray:
    """True for each packed pair of conversations whose two pieces, consecutive in `ids`, are equal in the tokens that a
    row keeps."""
    starts = np.cumsum(length_N) - length_N
    kept = np.minimum(length_N, seq_len + 1)  # the target of the last position too
    pieces = [ids[start : start + num] for start, num in zip(starts.tolist(), kept.tolist(), strict=True)]
    return np.array([np.array_equal(pieces[at], pieces[at + 1]) for at in range(0, len(pieces), 2)], bool)


def _set_aside(account: dict[str, Any], table: pa.Table, reason: np.ndarray, lost: dict[str, dict[str, int]]) -> None:
    """Set aside conversations that are not packed: move those of which no rendering is left from used to refused.

    Args:
        account: what `Account.summary` gives; changed.
        table: one row for each rendering.
        reason: why it is lost, or "".
        lost: gets how many renderings are lost by reason, of how many conversations, and of how many nothing is left.
    """
    document, gone = table["document"].to_numpy(), reason != ""
    left = np.unique(document[~gone])
    for name in np.unique(reason[gone]).tolist():
        here = reason == name
        whole = np.flatnonzero(here & ~np.isin(document, left))
        at = whole[np.unique(document[whole], return_index=True)[1]]
        rows = table.select(["name", "bytes"]).take(at).to_pylist()
        numbers = {"rows": int(here.sum()), "documents": len(np.unique(document[here])), "refused": len(rows)}
        lost[name] = {key: lost.get(name, {}).get(key, 0) + number for key, number in numbers.items()}
        if not rows:
            continue
        size = sum(row["bytes"] for row in rows)
        for what, amount in (("documents", len(rows)), ("text_bytes", size)):
            account["read"][what]["used"] -= amount
            account["read"][what]["refused"] += amount
        examples = "; ".join(row["name"] for row in rows[:3])
        entry = {"files": 0, "file_bytes": 0, "documents": 0, "text_bytes": 0, "examples": examples}
        entry = account["refused"].setdefault(name, entry)
        entry["documents"] += len(rows)
        entry["text_bytes"] += size

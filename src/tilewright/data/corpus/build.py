"""From a source to encoded text: read, deduplicate, hold out, train the tokenizer, encode. One cache entry.

What is here does not depend on the row length or the task, so that changing those costs only the packing
(`prepare`). The entry holds `train.npy`, `holdout.npy` (token streams), `holdout.bytes.npy` (bytes per token),
`documents.parquet` (one row per document, in stream order, training first), the tokenizer, `rejects.jsonl` and
`summary.json`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.core.errors import DataError
from tilewright.data.batches.token_rows import SPLITS, TOKEN_BYTES
from tilewright.data.common.encoder import FAILS, Spared, choose_encoder
from tilewright.data.common.guarded_tokenizer import TokenizerError
from tilewright.data.common.progress import ProgressBar
from tilewright.data.common.records import rejected
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer, train_tokenizer, training_sample
from tilewright.data.corpus.encode import Text, encode_stream
from tilewright.data.corpus.read import Spool, collect
from tilewright.data.corpus.validation import add_validation
from tilewright.data.dataset.account import listed
from tilewright.data.dataset.compressors import compressor_bits
from tilewright.data.sources.source_parts import Source
from tilewright.data.stages.copies.minhash import near_copy_clusters
from tilewright.data.stages.split.divide_clusters import LARGEST_SHARE, divide_clusters, largest_share, slices
from tilewright.data.stages.split.holdout import Split, choose_holdout


def build_corpus(
    folder: Path,
    source: Source,
    *,
    domains: tuple[str, ...],
    max_bytes: int,
    holdout: float,
    vocab_size: int,
    tokenizer: str,
    seed: int,
    validation: Source | None = None,
    progress: ProgressBar,
) -> None:
    """Fill `folder` with the files of the entry. Arguments as in `prepare`; `validation` is what is held out instead.

    Raises:
        DataError: nothing usable in the source, or a tokenizer that cannot be read.
    """
    given = load_tokenizer(tokenizer) if tokenizer else None
    spool_path = folder / "spool.bin"
    spool = collect(source, spool_path, domains=domains, max_bytes=max_bytes, seed=seed, progress=progress)
    own = None
    if validation is not None:
        own = add_validation(spool, validation, folder / "validation.bin", seed=seed, progress=progress)
    data = spool.data()
    progress.phase("finding near-copies", len(data))
    where = data, spool.offsets, spool.lengths
    cluster_of = near_copy_clusters(*where, progress.advance)
    share = largest_share(holdout or LARGEST_SHARE)
    divided = divide_clusters(slices(*where), spool.lengths, cluster_of, spool.domain_of, share)
    if own is not None:
        split = Split(np.arange(len(spool)) >= own.first)
        split.notes.append(own.note(divided.cluster_of, [spool.digest(i) for i in range(len(spool))]))
    else:
        split = choose_holdout(spool, divided.cluster_of, holdout, seed)
        split.notes += divided.notes(spool.domains) if holdout else []
    texts = _texts(spool, split)
    if not texts["train"] or (not texts["holdout"] and holdout):
        raise _too_little(source, spool)

    def read(text: Text) -> str:
        start = int(spool.offsets[text.document])
        return bytes(data[start + text.start : start + text.stop]).decode("utf-8")

    if given is None:
        progress.phase("training the tokenizer")
        sizes = np.array([text.stop - text.start for text in texts["train"]], np.int64)
        given = train_tokenizer((read(texts["train"][i]) for i in training_sample(sizes, seed)), vocab_size)
    given.save(folder / "tokenizer")
    progress.phase("encoding", len(data))
    quick, encoder = choose_encoder(given, len(data), map(read, texts["train"]))
    spared, tables = Spared(), []

    def fails(text: Text, error: TokenizerError) -> None:
        account = spool.account if own is None or text.document < own.first else own.account
        record, size = spool.records[text.document], text.stop - text.start
        if text.document in split.cut and text.start:  # its beginning was counted
            record.documents += 1
        account.take_back(record, rejected(record.file, FAILS, error.problems[0].got, num_bytes=size))

    for name in SPLITS:
        how = {"sizes": folder / TOKEN_BYTES if name == "holdout" else None, "spared": spared, "fails": fails}
        lengths = encode_stream(folder / f"{name}.npy", texts[name], read, quick, progress.advance, **how)
        encoded = [text for text, length in zip(texts[name], lengths.tolist(), strict=True) if length]
        if texts[name] and not encoded:
            raise _too_little(source, spool)
        tables.append(_table(name, spool, split, encoded, lengths[lengths > 0], divided.cluster_of))
    progress.phase("compressing what is held out")
    compressed = _compressed(spool, texts["holdout"], read)
    spool_path.unlink()
    table = pa.concat_tables(tables)
    pq.write_table(table, folder / "documents.parquet")
    spool.account.drop({spool.domains[d] for d in split.dropped})
    with (folder / "rejects.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(listed(r), ensure_ascii=False) + "\n" for r in spool.rejects)
    summary: dict[str, Any] = _summary(source, spool, split, cluster_of, table, given) | {"encoder": encoder}
    if own is not None:
        summary["validation"] = own.summary()
    for domain, bits in compressed.items():
        summary["domains"][domain]["compressors"] = bits
    (folder / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")


def _compressed(spool: Spool, held: list[Text], read: Callable[[Text], str]) -> dict[str, dict[str, float]]:
    """Bits per byte of each domain's held-out text, by compressor."""
    by_domain: dict[str, list[bytes]] = {}
    for text in held:
        by_domain.setdefault(spool.domains[spool.domain_of[text.document]], []).append(read(text).encode("utf-8"))
    return {domain: compressor_bits(texts) for domain, texts in by_domain.items()}


def _too_little(source: Source, spool: Spool) -> DataError:
    return DataError(
        "Too little text for a training and a held-out part",
        where=source.label,
        got=f"{len(spool)} documents, {int(spool.lengths.sum())} bytes",
        need="two different documents, or one of a few hundred bytes, that the tokenizer reads",
        try_="more text, or data.holdout = 0, which holds nothing out",
    )


def _texts(spool: Spool, split: Split) -> dict[str, list[Text]]:
    """The texts of each split, domain by domain; a cut document gives one to each."""
    train, held = [], []
    for i in np.argsort(spool.domain_of, kind="stable").tolist():
        length = int(spool.lengths[i])
        if spool.domain_of[i] in split.dropped:
            continue
        if i in split.cut:
            train.append(Text(i, 0, split.cut[i]))
            held.append(Text(i, split.cut[i], length))
        else:
            (held if split.held[i] else train).append(Text(i, 0, length))
    return {"train": train, "holdout": held}


def _table(
    name: str, spool: Spool, split: Split, texts: list[Text], lengths: np.ndarray, cluster_of: np.ndarray
) -> pa.Table:
    index = np.array([t.document for t in texts], np.int64)
    return pa.table(
        {
            "split": pa.array([name] * len(texts), pa.string()),
            "domain": pa.array([spool.domains[d] for d in spool.domain_of[index]], pa.string()),
            "name": pa.array(
                [spool.names[i] + (" (cut)" if i in split.cut else "") for i in index.tolist()], pa.string()
            ),
            "bytes": pa.array([t.stop - t.start for t in texts], pa.int64()),
            "length": pa.array(lengths),
            "cluster": pa.array(cluster_of[index]),
        }
    )


def _summary(
    source: Source,
    spool: Spool,
    split: Split,
    cluster_of: np.ndarray,
    table: pa.Table,
    tokenizer: Tokenizer,
) -> dict:
    """Counts over the whole entry and by domain; tokens are text tokens, without begin and end."""
    columns = {name: np.array(table[name].to_pylist()) for name in ("split", "domain", "bytes", "length")}
    tokens = columns["length"] - 2
    by_domain = {}
    for domain in sorted(set(columns["domain"].tolist())):
        here = columns["domain"] == domain
        held = here & (columns["split"] == "holdout")
        by_domain[domain] = {
            "docs": int(here.sum()),
            "bytes": int(columns["bytes"][here].sum()),
            "tokens": int(tokens[here].sum()),
            "holdout_docs": int(held.sum()),
            "holdout_tokens": int(tokens[held].sum()),
        }
    total_bytes, total_tokens = int(columns["bytes"].sum()), int(tokens.sum())
    return {
        "source": source.label,
        "available_bytes": spool.available_bytes,
        "docs": table.num_rows,
        "bytes": total_bytes,
        "tokens": total_tokens,
        "bytes_per_token": round(total_bytes / max(1, total_tokens), 3),
        "vocab_size": tokenizer.vocab_size,
        "duplicates": spool.num_duplicates,
        "near_duplicates": int(len(cluster_of) - len(np.unique(cluster_of))),
        **spool.account.summary(),
        "notes": split.notes,
        "domains": by_domain,
    }

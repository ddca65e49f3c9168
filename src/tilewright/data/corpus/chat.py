"""From rows of conversations to token streams: read, recognise, render, encode, hold out. One cache entry.

Like `corpus.build`, and with the same files, but a document is a rendered conversation (of preferences: two, the chosen
and the rejected one), never cut and never in both splits; `*.trained.npy` beside each stream says which of its tokens
are trained. Near-copies are told by what was said, without roles and system messages (`chat_rows.said`).
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tilewright.core.errors import DataError
from tilewright.data.batches.token_rows import SPLITS
from tilewright.data.chat.chat_rows import TABLES, RowReader, is_pair, read_row, said
from tilewright.data.chat.errors import ChatError
from tilewright.data.chat.row_renderer import NUM_EXAMPLES, ROWS, ROWS_BYTES, RowRenderer, example_of
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.trained_tokens import ChatSample
from tilewright.data.common.encoder import in_batches
from tilewright.data.common.npy_writer import NpyWriter, token_dtype
from tilewright.data.common.progress import ProgressBar
from tilewright.data.common.records import Record, Rejected, rejected
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer, train_tokenizer, training_sample
from tilewright.data.corpus.read import Spool, collect
from tilewright.data.corpus.validation import Validation, add_validation
from tilewright.data.dataset.account import PartRecord, listed
from tilewright.data.dataset.open_built import built_at, built_format, read_dataset
from tilewright.data.sources.path_purpose import Wanted
from tilewright.data.sources.source_parts import Source
from tilewright.data.sources.user_files import user_source
from tilewright.data.stages.copies.minhash import near_copy_clusters
from tilewright.data.stages.split.divide_clusters import LARGEST_SHARE, Divided, divide_clusters, largest_share, slices
from tilewright.data.stages.split.holdout import Split, choose_holdout


@dataclass(frozen=True)
class _Recogniser:
    """Rows to their canonical form."""

    rows: RowReader

    def __call__(self, record: PartRecord, document: Record) -> Iterator[Record | Rejected]:
        try:
            found = self.rows.read(record.file, document.text, of_table=record.file.endswith(TABLES))
        except ChatError as error:
            size = len(document.text.encode("utf-8", "surrogatepass"))
            yield _reject(record, document.place, error, size)
            return
        yield replace(document, text=json.dumps(found, ensure_ascii=False))


@dataclass
class _Encoded:
    """Samples of all conversations that can be used, in the order of the spool."""

    documents: list[int] = field(default_factory=list)
    samples: list[ChatSample] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """What the template does not render and may leave out, by how many conversations have it."""


def build_chat(
    folder: Path,
    source: Source,
    *,
    pairs: bool,
    chat_template: str,
    model_folder: str,
    tokenizer: str,
    vocab_size: int,
    domains: tuple[str, ...],
    max_bytes: int,
    holdout: float,
    seed: int,
    validation: Source | None = None,
    progress: ProgressBar,
) -> None:
    """Fill `folder` with the files of the entry. Arguments as in `prepare`; `pairs` for preferences; `validation` is
    what is held out instead.

    Raises:
        DataError: nothing usable in the source, or a tokenizer or template that cannot be read.
        ConfigError: no template.
    """
    rows = RowReader(pairs=pairs)
    recognise = _Recogniser(rows)
    spool_path = folder / "spool.bin"
    spool = collect(
        source, spool_path, domains=domains, max_bytes=max_bytes, seed=seed, progress=progress, convert=recognise
    )
    own = None
    if validation is not None:
        own_path = folder / "validation.bin"
        own = add_validation(spool, validation, own_path, seed=seed, progress=progress, convert=recognise)
    data = spool.data()
    spoken, offsets, lengths = _spoken(spool, data)
    progress.phase("finding near-copies", len(spoken))
    cluster_of = near_copy_clusters(spoken, offsets, lengths, progress.advance)
    share = largest_share(holdout or LARGEST_SHARE)
    texts = slices(spoken, offsets, lengths)
    divided = divide_clusters(texts, lengths, cluster_of, spool.domain_of, share)
    given = load_tokenizer(tokenizer) if tokenizer else train_tokenizer((), vocab_size)
    chat = ChatTemplate.load(model_folder or tokenizer, given, chat_template)
    progress.phase("rendering and encoding", len(data))
    encoded = _encode(spool, data, range(len(spool)), chat, pairs, own, progress, hold=bool(tokenizer))
    kept = np.unique(np.array(encoded.documents, np.int64))
    split = _hold_out(source, spool, divided, kept, holdout, seed, own)
    if not tokenizer:  # a template renders the same with any; which conversations are trained on is known now
        train = kept[~split.held[kept] & ~np.isin(spool.domain_of[kept], split.dropped)]
        chosen = train[training_sample(lengths[train], seed)]
        given = train_tokenizer((bytes(text).decode() for i in chosen for text in texts(i[None])), vocab_size)
        chat = ChatTemplate.load(model_folder, given, chat_template)
        progress.phase("encoding with the trained tokenizer", int(spool.lengths[kept].sum()))
        encoded = _encode(spool, data, kept.tolist(), chat, pairs, own, progress, hold=True)
    if own is not None:
        split.notes.append(own.note(divided.cluster_of, [spool.digest(i) for i in range(len(spool))]))
    table = _write_streams(folder, spool, split, encoded, given, divided.cluster_of)
    pq.write_table(table, folder / "documents.parquet")
    chat.tokenizer.save(folder / "tokenizer")
    chat.save(folder / "tokenizer")
    spool_path.unlink()
    spool.account.drop({spool.domains[d] for d in split.dropped})
    with (folder / "rejects.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(listed(r), ensure_ascii=False) + "\n" for r in spool.rejects)
    summary = _summary(source, spool, split, cluster_of[kept], table, given)
    summary["chat"] = _facts(rows, encoded, chat, pairs)
    if own is not None:
        summary["validation"] = own.summary()
    (folder / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")


def first_shape(source: str, want: Wanted | None = None) -> str:
    """The shape of the first row of a path that can be read (see `rows.read_row`), "" where it is none of them; of a
    built dataset the format, "" of text.

    Args:
        source: the path.
        want: what it is read for; None: conversations.

    Raises:
        DataError: the path does not exist.
    """
    if (built := built_at(source)) is not None:
        format = built_format(read_dataset(built))
        return "" if format == "text" else format
    for part in user_source(source, None, want=want).parts:
        for item in part.read():
            if isinstance(item, Record):
                try:
                    row = json.loads(item.text)
                    return read_row(row, pairs=is_pair(row))[0]
                except (ChatError, ValueError, RecursionError, TypeError):
                    return ""
    return ""


def _reject(record: PartRecord, name: str, error: DataError, size: int) -> Rejected:
    got = error.problems[0].got
    return rejected(record.file, error.problems[0].what, f"{name}: {got}" if got else name, num_bytes=size)


def _spoken(spool: Spool, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The text of what is said in each conversation: UTF-8 bytes, and where each begins and how long it is."""
    texts = [(said(json.loads(spool.text(data, i))) or "\n").encode("utf-8") for i in range(len(spool))]
    lengths = np.array([len(text) for text in texts], np.int64)
    return np.frombuffer(b"".join(texts), np.uint8), np.cumsum(lengths) - lengths, lengths


def _encode(
    spool: Spool,
    data: np.ndarray,
    documents: Sequence[int],
    chat: ChatTemplate,
    pairs: bool,
    own: Validation | None,
    progress: ProgressBar,
    *,
    hold: bool,
) -> _Encoded:
    """Render conversations of a spool, and take back those that cannot be; with their samples, where those are to be
    held in memory."""
    encoded, renderer = _Encoded(), RowRenderer(chat, pairs=pairs)
    sizes = spool.lengths.tolist()
    for batch in in_batches(documents, sizes.__getitem__, ROWS, ROWS_BYTES):
        rows = [json.loads(spool.text(data, i)) for i in batch]
        for i, rendered in zip(batch, renderer.render(rows), strict=True):
            if isinstance(rendered, DataError):
                record = spool.records[i]
                account = spool.account if own is None or i < own.first else own.account
                account.take_back(record, _reject(record, spool.names[i], rendered, sizes[i]))
                progress.advance(sizes[i])
                continue
            found = rendered.samples
            encoded.left_out.update(rendered.left_out)
            if len(encoded.samples) >= NUM_EXAMPLES:
                found = [replace(sample, text="", spans=()) for sample in found]
            encoded.samples += found if hold else ()
            encoded.documents += [i] * len(found)
            progress.advance(sizes[i])
    return encoded


def _hold_out(
    source: Source,
    spool: Spool,
    divided: Divided,
    kept: np.ndarray,
    share: float,
    seed: int,
    own: Validation | None,
) -> Split:
    """The split of all documents, by those that are kept; the others are in no part.

    Raises:
        DataError: too little is left.
    """
    if not len(kept):
        worst = sorted(spool.rejects, key=lambda r: -r.count)[:5]
        raise DataError(
            "No usable conversation in the training data",
            where=source.label,
            got="\n".join(f"{r.path}: {r.rule} ({r.count}x); {r.value}" for r in worst),
            need="rows with an answer that the chat template can render",
            try_="data.chat_template = the template that fits the rows, or other rows",
        )
    held = np.zeros(len(spool), bool)
    if own is not None:
        held[own.first :] = True
        split = Split(held)
        usable = kept < own.first
        got = f"{int(usable.sum())} of {source.label}, {int((~usable).sum())} of {own.label}"
        if usable.all() or not usable.any():
            need = "usable conversations in both"
            raise DataError(
                "No usable conversation in one of two sources", where="data.eval_source", got=got, need=need
            )
        return split
    mine = Spool(spool.path, spool.domains, domain_of=spool.domain_of[kept], lengths=spool.lengths[kept])
    mine.names = [spool.names[i] for i in kept.tolist()]
    clusters = divided.cluster_of[kept]
    split = choose_holdout(mine, clusters, share, seed, may_cut=False)
    split.notes += divided.notes(spool.domains) if share else []
    if split.dropped:  # all of a domain is one cluster: its conversations are held out one by one
        alike = split.dropped
        single = np.where(np.isin(mine.domain_of, alike), len(spool) + np.arange(len(kept)), clusters)
        notes, split = split.notes, choose_holdout(mine, single, share, seed, may_cut=False)
        split.notes += notes
        for domain in sorted(set(alike) - set(split.dropped)):
            name = spool.domains[domain]
            split.notes.append(f"{name}: all of it are near-copies, so what is held out is not independent")
    held[kept] = split.held
    usable = np.isin(np.unique(mine.domain_of), split.dropped, invert=True)
    if not usable.any() or held[kept].all():
        raise DataError(
            "Too few conversations for a training and a held-out part",
            where=source.label,
            got=f"{len(kept)} usable conversations",
            need="two different ones",
            try_="data.holdout = 0, which holds nothing out",
        )
    return Split(held, {}, split.dropped, split.notes)


def _write_streams(
    folder: Path, spool: Spool, split: Split, encoded: _Encoded, tokenizer: Tokenizer, cluster_of: np.ndarray
) -> pa.Table:
    """Both streams and their masks, domain by domain; the table of their samples."""
    document = np.array(encoded.documents, np.int64)
    domain = spool.domain_of[document]
    usable = ~np.isin(domain, split.dropped)
    tables = []
    for name in SPLITS:
        order = np.flatnonzero(usable & (split.held[document] == (name == "holdout")))
        order = order[np.argsort(domain[order], kind="stable")]
        mine: Sequence[ChatSample] = [encoded.samples[i] for i in order.tolist()]
        with (
            NpyWriter(folder / f"{name}.npy", token_dtype(tokenizer.vocab_size)) as ids,
            NpyWriter(folder / f"{name}.trained.npy", np.dtype("u1")) as trained,
        ):
            for sample in mine:
                ids.append(sample.ids_T)
                trained.append(sample.trained_T)
        which = document[order]
        columns: dict[str, Any] = {
            "split": pa.array([name] * len(mine), pa.string()),
            "domain": pa.array([spool.domains[d] for d in domain[order]], pa.string()),
            "name": pa.array([spool.names[i] for i in which.tolist()], pa.string()),
            "document": pa.array(which),
            "bytes": pa.array(spool.lengths[which]),
            "length": pa.array([len(sample.ids_T) for sample in mine], pa.int64()),
            "trained": pa.array([int(sample.trained_T.sum()) for sample in mine], pa.int64()),
            "first": pa.array([int(np.argmax(sample.trained_T)) for sample in mine], pa.int64()),
            "cluster": pa.array(cluster_of[which]),
        }
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)


def _summary(
    source: Source, spool: Spool, split: Split, cluster_of: np.ndarray, table: pa.Table, tokenizer: Tokenizer
) -> dict[str, Any]:
    names = ("split", "domain", "document", "bytes", "length", "trained")
    columns = {name: np.array(table[name].to_pylist()) for name in names}
    once = np.unique(columns["document"], return_index=True)[1]
    first = np.zeros(table.num_rows, bool)
    first[once] = True

    def counts(here: np.ndarray) -> dict[str, int]:
        return {
            "docs": int((here & first).sum()),
            "bytes": int(columns["bytes"][here & first].sum()),
            "tokens": int(columns["length"][here].sum()),
            "trained_tokens": int(columns["trained"][here].sum()),
        }

    by_domain: dict[str, dict[str, Any]] = {}
    for domain in sorted(set(columns["domain"].tolist())):
        here = columns["domain"] == domain
        held = counts(here & (columns["split"] == "holdout"))
        by_domain[domain] = counts(here) | {"holdout_docs": held["docs"], "holdout_tokens": held["tokens"]}
        by_domain[domain]["compressors"] = {}
    total = counts(np.ones(table.num_rows, bool))
    return {
        "source": source.label,
        "available_bytes": spool.available_bytes,
        **total,
        "bytes_per_token": round(total["bytes"] / max(1, total["tokens"]), 3),
        "vocab_size": tokenizer.vocab_size,
        "duplicates": spool.num_duplicates,
        "near_duplicates": int(len(cluster_of) - len(np.unique(cluster_of))),
        **spool.account.summary(),
        "notes": split.notes,
        "domains": by_domain,
    }


def _facts(rows: RowReader, encoded: _Encoded, chat: ChatTemplate, pairs: bool) -> dict[str, Any]:
    """The summary of chat data before training begins: shapes by file, the template, a rendered example."""
    return {
        "shapes": {file: dict(shapes) for file, shapes in rows.shapes.items()},
        "template": chat.where,
        "not_read": dict((rows.not_read + encoded.left_out).most_common()),
        "rendered_again": 0 if pairs else len(encoded.documents) - len(set(encoded.documents)),
        "saved_tokens": sum(sample.saved for sample in encoded.samples),
        "example": example_of([sample for sample in encoded.samples if sample.text]),
    }

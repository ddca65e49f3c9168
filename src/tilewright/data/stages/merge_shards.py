"""Last stage: the dataset. Streams of all shards joined, domain by domain, and what the build has to say of itself.

`tokens/` is what training reads: `train.npy`, `holdout.npy` and beside them `holdout.bytes.npy` and, of windows with
context, `*.trained.npy`; `documents.parquet` (one row per run of tokens, training first), the tokenizer,
`rejects.jsonl` and `summary.json`. Records and rejects are Parquet files per shard, which Hugging Face datasets opens.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from tilewright.data.common.npy_writer import NpyWriter
from tilewright.data.common.records import EMPTY, NOTHING, rejected
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.dataset.account import TYPES, Account, PartRecord, listed
from tilewright.data.dataset.compressors import compressor_bits
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import Listing
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, Folders, FoundValue, Only, StageInput, one_unit
from tilewright.data.engine.record_tables import REJECTS, TableWriter, batches, reject_row, rows
from tilewright.data.sources.source_parts import Source
from tilewright.data.stages.chat.render_conversations import EXAMPLE, RENDERINGS, ChatFacts
from tilewright.data.stages.copies.exact_copies import shard_of
from tilewright.data.stages.encode_records import SPLIT_NAMES
from tilewright.data.stages.media_tensors import media_shards, publish_media
from tilewright.data.stages.split.split_stage import source_label
from tilewright.data.stages.stage_order import encoding, rejecting, with_tokenizer

TOKENS = "tokens"
DOCUMENT_COLUMNS = (
    *("domain", "path", "part", "start", "stop", "chunk", "context", "id", "language"),
    *("bytes", "tokens", "length", "cluster"),
)
_OF_RENDERINGS = ("trained", "first", "document")
_COPY = 1 << 20  # numbers that are copied at once
_COMPRESSED_BYTES = 4 << 20  # of a domain's held-out text that is compressed: xz takes 11 times that in memory


@dataclass(frozen=True)
class Finished:
    """Folders of all finished shards, by stage, and the folders of the units that there is one of."""

    listing: Listing
    media: Sequence[Path]
    """Of shards with tensors; empty where none are asked for."""
    encoded: Sequence[Path]
    rejects: Sequence[Sequence[Path]]
    """By stage, in their order, of each shard."""
    tokenizer: Path
    split: Path
    duplicates: Mapping[str, int]
    changed: Mapping[str, int]
    """How many records each kind of repair changed."""
    label: str
    chat: Mapping[str, Any]
    """Facts of conversations; {} of text."""


def assemble(index: int, settings: SimpleNamespace, folder: Path, **inputs: Any) -> Mapping[str, Any]:
    """Assemble the dataset: `tokens/`, `records/`, `rejects/` and, if asked for, `media/` in `folder`; returns counts.

    Args:
        index: 0.
        settings: none.
        folder: gets the files.
        inputs: see `Finished`.
    """
    done = Finished(**inputs)
    tokens = folder / TOKENS
    tokens.mkdir()
    shutil.copytree(done.tokenizer / "tokenizer", tokens / "tokenizer")
    for name in SPLIT_NAMES.values():
        for suffix in ("", ".bytes", ".trained"):
            if (done.encoded[0] / f"{name}{suffix}.npy").exists():
                _join([one / f"{name}{suffix}.npy" for one in done.encoded], tokens / f"{name}{suffix}.npy")
    _documents(done, tokens / "documents.parquet")
    (folder / "records").mkdir()
    for name in (*SPLIT_NAMES.values(), "media"):
        filled = [one / f"{name}.parquet" for one in done.encoded if pq.read_metadata(one / f"{name}.parquet").num_rows]
        for number, one in enumerate(filled):
            shutil.copyfile(one, folder / "records" / f"{name}-{number:05}-of-{len(filled):05}.parquet")
    tensors = publish_media(done.media, folder / "media") if len(done.media) else {}
    account = _account(done.listing)
    _rejects(done, folder / "rejects", account)
    summary = _summary(done, account, tokens) | {"tensors": tensors}
    with (tokens / "rejects.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(listed(r), ensure_ascii=False) + "\n" for r in account.whole.rows())
    (tokens / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    return {"docs": summary["docs"], "tokens": summary["tokens"], "bytes": summary["bytes"]}


def _join(parts: list[Path], out: Path) -> None:
    """Join several streams of the dataset to one."""
    with NpyWriter(out, np.load(parts[0], mmap_mode="r", allow_pickle=False).dtype) as writer:
        for part in parts:
            values = np.load(part, mmap_mode="r", allow_pickle=False)
            for start in range(0, len(values), _COPY):
                writer.append(values[start : start + _COPY])


def _documents(done: Finished, out: Path) -> None:
    """Documents of the dataset: one row per run, in the order of the streams."""
    import pyarrow as pa

    columns = (*DOCUMENT_COLUMNS, *_OF_RENDERINGS) if done.chat else DOCUMENT_COLUMNS
    text = pa.schema([pa.field("split", pa.string()), pa.field("name", pa.string())])
    schema = pa.schema([*text, *(RENDERINGS.field(name) for name in columns)])
    with TableWriter(out, schema) as writer:
        for split in SPLIT_NAMES.values():
            for shard in done.encoded:
                for row in rows(shard / f"{split}.parquet", columns):
                    writer.append(row | {"split": split, "name": place(row)})


def place(row: Mapping[str, Any]) -> str:
    """The place of a record in a dataset: path, part and bytes, for a person to find it again.

    Example:
        >>> place({"path": "a.jsonl", "part": "row", "start": 10, "stop": 20})
        'a.jsonl, row, bytes 10-20'
    """
    found = f"{row['path']}, {row['part']}" if row["part"] else row["path"]
    return f"{found}, bytes {row['start']}-{row['stop']}" if row["stop"] else found


@dataclass
class _Account:
    """The account of a dataset by file: what of each is used and refused; and how much was dropped in each domain."""

    whole: Account
    files: dict[str, PartRecord]
    """Of all that is read, by name."""
    dropped: Counter[str]

    def refuse(self, row: Mapping[str, Any]) -> None:
        """Count a row of `REJECTS` that a stage wrote of something in a file, or of the file itself."""
        is_file = row["rule"] in (TYPES, NOTHING, EMPTY) and not row["part"]
        rule = f"file type {row['value']} is not read" if row["rule"] == TYPES and is_file else row["rule"]
        example = row["excerpt"] if row["id"] else row["value"]
        reject = rejected(row["path"], rule, example, count=row["count"], num_bytes=row["num_bytes"])
        self.dropped[row["domain"]] += row["count"]
        if is_file:
            self.whole.refuse_file(reject)
        else:
            self.whole.refuse(self.files[row["path"]], reject)

    def use(self, batch: Mapping[str, list[Any]], known: set[str] | None) -> None:
        """Count runs of the dataset, windows of a record as one.

        Args:
            batch: columns of `RUNS`.
            known: ids of records that were counted; None: media, whose text is not trained on.
        """
        names = ("id", "path", "chunk", "id" if known is None else "bytes")
        for one, path, chunk, size in zip(*(batch[name] for name in names), strict=True):
            record = self.files[path]
            record.documents += chunk == 0 and one not in (known or ())
            record.text_bytes += 0 if known is None else size


def _account(listing: Listing) -> _Account:
    """The account of a dataset before anything of its files is counted."""
    parts: Counter[tuple[str, str]] = Counter()
    for item in (item for items in listing.shards for item in items):
        parts[item.name, ""] += item.size
    for name, size, why in listing.left:
        parts[name, why] += size
    sizes: Counter[str] = Counter()
    for (name, _), size in parts.items():
        sizes[name] += size
    account = _Account(Account(Source("", "", (), tuple(listing.rejects), sizes)), {}, Counter())
    for (name, why), size in parts.items():
        record = account.whole.add_part(PartRecord("", name, size, opened=True, reason=why))
        if not why:
            account.files[name] = record
    for reject in listing.rejects:
        account.dropped[reject.domain] += reject.count
    return account


def _rejects(done: Finished, out: Path, account: _Account) -> None:
    """Rejects in the dataset: copy those of each shard into one Parquet file, and count them."""
    out.mkdir()
    with TableWriter(out / "00000.parquet", REJECTS) as writer:
        for reject in done.listing.rejects:
            writer.append(reject_row(reject))
    for shard, folders in enumerate(zip(*done.rejects, strict=True), 1):
        with TableWriter(out / f"{shard:05}.parquet", REJECTS) as writer:
            for row in (row for folder in folders for row in rows(folder / "rejects.parquet")):
                writer.append(row)
                account.refuse(row)


def _summary(done: Finished, account: _Account, tokens: Path) -> dict[str, Any]:
    """Summary of the dataset: counts over it and by domain, with the keys that every kind of prepared text has.

    `domains` has those with tokens, which training tells apart; `records` has all: records by modality, and how many
    `dropped`.
    """
    by_domain: dict[str, Counter[str]] = {}
    kinds: dict[str, Counter[str]] = {}
    held: dict[str, bytearray] = {}
    columns = ["id", "domain", "modality", "path", "chunk", "bytes", "tokens", "trained" if done.chat else "text"]
    split_notes = json.loads((done.split / "split.json").read_bytes())
    cut = {int(shard_of(np.array([int(doc)], np.uint64))[0]) for doc in split_notes["cut"]}
    for split in SPLIT_NAMES.values():
        for shard, one in enumerate(done.encoded):
            twice = set()  # records whose end is held out
            if split == "holdout" and shard in cut:
                twice = {row["id"] for row in rows(one / "train.parquet", ("id",))}
            for _, batch in batches(one / f"{split}.parquet", columns):
                _count(by_domain, split, batch)
                _count_kinds(kinds, batch, twice)
                account.use(batch, twice)
                if split == "holdout" and not done.chat:  # renderings are no text that is compressed
                    _take(held, batch)
    media = 0
    for one in done.encoded:
        for _, batch in batches(one / "media.parquet", ("id", "domain", "modality", "path", "chunk")):
            media += len(batch["path"])
            _count_kinds(kinds, batch, set())
            account.use(batch, None)
    total = sum(by_domain.values(), Counter())
    every = set(done.listing.domains()) | set(account.dropped)
    records = {n: dict(sorted(kinds.get(n, {}).items())) | {"dropped": account.dropped[n]} for n in sorted(every)}
    domains: dict[str, Any] = {}
    more = ("trained_tokens",) if done.chat else ()
    shown = ("docs", "bytes", "tokens", "holdout_docs", "holdout_tokens", *more)
    for name, counts in sorted(by_domain.items()):
        domains[name] = {k: counts[k] for k in shown}
        domains[name]["compressors"] = {} if done.chat else compressor_bits([held.get(name, b"")])
    return {
        "source": done.label,
        "available_bytes": done.listing.found_bytes,
        "docs": total["docs"],
        "bytes": total["bytes"],
        "tokens": total["tokens"],
        **{name: total[name] for name in more},
        "bytes_per_token": round(total["bytes"] / max(1, total["tokens"]), 3),
        "media": media,
        "vocab_size": load_tokenizer(tokens / "tokenizer").vocab_size,
        "duplicates": done.duplicates["exact"],
        "near_duplicates": done.duplicates["near"],
        **account.whole.summary(),
        "changed": dict(done.changed),
        "notes": split_notes["notes"],
        "domains": domains,
        "records": records,
        **_said_of_chat(done),
    }


def _said_of_chat(done: Finished) -> dict[str, Any]:
    """The dataset's facts of conversations, with an example; nothing of text."""
    if not done.chat:
        return {}
    examples = (json.loads((one / EXAMPLE).read_bytes()) for one in done.encoded)
    return {"chat": {**done.chat, "example": next(filter(None, examples), {"text": "", "spans": []})}}


def _count(by_domain: dict[str, Counter[str]], split: str, batch: Mapping[str, list[Any]]) -> None:
    """Count for the dataset runs, bytes and tokens of a row group; of renderings the first of each conversation counts
    as one."""
    several = "trained" in batch  # renderings of one conversation
    trained = batch.get("trained", [0] * len(batch["chunk"]))
    columns = (*(batch[name] for name in ("domain", "bytes", "tokens", "chunk")), trained)
    for domain, size, tokens, chunk, of_answers in zip(*columns, strict=True):
        counts = by_domain.setdefault(domain, Counter())
        docs = int(not several or chunk == 0)
        counts.update({"docs": docs, "bytes": size, "tokens": tokens, "trained_tokens": of_answers})
        if split == "holdout":
            counts.update({"holdout_docs": docs, "holdout_tokens": tokens})


def _count_kinds(kinds: dict[str, Counter[str]], batch: Mapping[str, list[Any]], known: set[str]) -> None:
    """Count kinds in the dataset: records of each modality by domain; windows of a record are one, and those of the ids
    `known` were counted."""
    for name, domain, modality, chunk in zip(*(batch[n] for n in ("id", "domain", "modality", "chunk")), strict=True):
        kinds.setdefault(domain, Counter())[modality] += chunk == 0 and name not in known


def _take(held: dict[str, bytearray], batch: Mapping[str, list[Any]]) -> None:
    for domain, text in zip(batch["domain"], batch["text"], strict=True):
        texts = held.setdefault(domain, bytearray())
        if len(texts) < _COMPRESSED_BYTES:
            texts += text.encode()


class ListedFiles(StageInput):
    """The listed files, known by what a dataset says of them."""

    def identity(self, c: Context, i: int) -> object:
        return c.listing.facts()

    def value(self, c: Context, i: int) -> Listing:
        return c.listing


class EveryReject(StageInput):
    """The folders of all stages that write rejects, known by these."""

    def identity(self, c: Context, i: int) -> object:
        return [c.told(stage) for stage in rejecting(c.build)]

    def value(self, c: Context, i: int) -> list[Folders]:
        return [Folders(c.units.root, stage, c.num_shards) for stage in rejecting(c.build)]


def _copies(c: Context, i: int) -> dict[str, int]:
    return {name: c.total("unique", name) for name in ("exact", "near")}


DATASET_STAGE = BuildStage(
    *("dataset", "joining the dataset", 6, one_unit, assemble),
    inputs={
        "listing": ListedFiles(),
        "media": Every("media", media_shards, told=True),
        "encoded": Every(encoding),
        "rejects": EveryReject(),
        "tokenizer": Only(with_tokenizer),
        "split": Only("split"),
        "duplicates": FoundValue(_copies),
        "changed": FoundValue(lambda c, i: c.totals("repair", "changed")),
        "label": FoundValue(lambda c, i: source_label(c)),
        "chat": ChatFacts(),
    },
)

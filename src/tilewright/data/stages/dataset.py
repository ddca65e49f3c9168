"""Last stage: the dataset. Streams of all shards joined, domain by domain, and what the build has to say of itself.

`tokens/` is what training reads: `train.npy`, `holdout.npy` and beside them `holdout.bytes.npy` and, of windows with
context, `*.trained.npy`; `documents.parquet` (one row per run of tokens, training first), the tokenizer,
`rejects.jsonl` and `summary.json`. Records and rejects are Parquet files per shard, which Hugging Face datasets opens.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

from tilewright.data.common.npy_writer import NpyWriter
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.dataset.account import TYPES, file_type, most_bytes
from tilewright.data.dataset.compressors import compressor_bits
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_files import Listing
from tilewright.data.engine.declared_inputs import Every, Folders, FoundValue, Only, StageInput, one_unit
from tilewright.data.engine.record_tables import REJECTS, TableWriter, batches, reject_row, rows
from tilewright.data.engine.stage import BuildStage
from tilewright.data.stages.chat.render import EXAMPLE, RENDERINGS, ChatFacts
from tilewright.data.stages.copies.exact_copies import shard_of
from tilewright.data.stages.encode import SPLIT_NAMES
from tilewright.data.stages.media import media_shards, publish_media
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
_MOST_LISTED = 1000  # rejects of one rule in rejects.jsonl; all of them are in the Parquet files


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
    refused = _rejects(done, folder / "rejects", tokens / "rejects.jsonl")
    summary = _summary(done, refused, tokens) | {"tensors": tensors}
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
class _Refused:
    """Rejects by rule: files, documents, bytes of each, and examples of where."""

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)
    types: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Files and bytes of each type that is not read."""
    by_domain: Counter[str] = field(default_factory=Counter)

    def add(self, row: Mapping[str, Any]) -> None:
        suffix = file_type(row["rule"]) or (row["value"] if row["rule"] == TYPES else "")
        if suffix:
            of_type = self.types.setdefault(suffix, {"files": 0, "file_bytes": 0})
            of_type["files"] += row["count"]
            of_type["file_bytes"] += row["num_bytes"]
        self.by_domain[row["domain"]] += row["count"]
        entry = self.entry(TYPES if suffix else row["rule"])
        kind = ("files", "file_bytes") if row["stage"] == "list" else ("documents", "text_bytes")
        entry[kind[0]] += row["count"]
        entry[kind[1]] += row["num_bytes"]
        if len(entry["examples"]) < 3 and row["path"] not in entry["examples"]:
            entry["examples"].append(row["path"])

    def entry(self, reason: str) -> dict[str, Any]:
        empty = {"files": 0, "file_bytes": 0, "documents": 0, "text_bytes": 0, "examples": []}
        return self.reasons.setdefault(reason, empty)


def _rejects(done: Finished, out: Path, lines: Path) -> _Refused:
    """Rejects in the dataset: copy those of each shard into one Parquet file, and list them by rule."""
    refused = _Refused()
    listed: Counter[str] = Counter()
    out.mkdir()
    with lines.open("w", encoding="utf-8") as file:
        for shard, folders in enumerate([None, *zip(*done.rejects, strict=True)]):
            source = _listed(done.listing) if folders is None else (r for f in folders for r in _rows_of(f))
            with TableWriter(out / f"{shard:05}.parquet", REJECTS) as writer:
                for row in source:
                    writer.append(row)
                    refused.add(row)
                    listed[row["rule"]] += 1
                    if listed[row["rule"]] <= _MOST_LISTED:
                        example = row["excerpt"] if row["id"] else row["value"]
                        one = {"where": row["path"], "reason": row["rule"], "count": row["count"], "example": example}
                        file.write(json.dumps(one | {"num_bytes": row["num_bytes"]}, ensure_ascii=False) + "\n")
    return refused


def _listed(listing: Listing) -> Iterator[dict[str, Any]]:
    return map(reject_row, listing.rejects)


def _rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    return rows(folder / "rejects.parquet")


def _summary(done: Finished, refused: _Refused, tokens: Path) -> dict[str, Any]:
    """Summary of the dataset: counts over it and by domain, with the keys that every kind of prepared text has.

    `domains` has those with tokens, which training tells apart; `records` has all: records by modality, and how many
    `dropped`.
    """
    by_domain: dict[str, Counter[str]] = {}
    kinds: dict[str, Counter[str]] = {}
    used: set[int] = set()
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
                used.update(xxhash.xxh3_64_intdigest(path.encode()) for path in set(batch["path"]))
                if split == "holdout" and not done.chat:  # renderings are no text that is compressed
                    _take(held, batch)
    media = 0
    for one in done.encoded:
        for _, batch in batches(one / "media.parquet", ("id", "domain", "modality", "path", "chunk")):
            media += len(batch["path"])
            _count_kinds(kinds, batch, set())
            used.update(xxhash.xxh3_64_intdigest(path.encode()) for path in set(batch["path"]))
    total = sum(by_domain.values(), Counter())
    files = {item.name: 0 for items in done.listing.shards for item in items}
    for item in (item for items in done.listing.shards for item in items):
        files[item.name] += item.size
    idle = [name for name in files if xxhash.xxh3_64_intdigest(name.encode()) not in used]
    if idle:
        entry = refused.entry("file of which no record stays")
        entry["files"], entry["file_bytes"] = len(idle), sum(files[name] for name in idle)
        entry["examples"] = idle[:3]
    if done.listing.left_bytes:
        entry = refused.entry("left out by max_bytes or domains")
        entry["files"], entry["file_bytes"] = done.listing.left_files, done.listing.left_bytes
    read = {
        "files": len(files) - len(idle),
        "file_bytes": sum(files.values()) - sum(files[name] for name in idle),
        "documents": sum(sum(of_domain.values()) for of_domain in kinds.values()),
        "text_bytes": total["bytes"],
    }
    lost = {name: sum(reason[name] for reason in refused.reasons.values()) for name in read}
    sizes = {name: (-reason["file_bytes"] - reason["text_bytes"], name) for name, reason in refused.reasons.items()}
    reasons = sorted(refused.reasons, key=lambda name: sizes[name])
    every = set(done.listing.domains()) | set(refused.by_domain)
    records = {n: dict(sorted(kinds.get(n, {}).items())) | {"dropped": refused.by_domain[n]} for n in sorted(every)}
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
        "read": {k: {"found": read[k] + lost[k], "used": read[k], "refused": lost[k]} for k in read},
        "refused": {r: refused.reasons[r] | {"examples": ", ".join(refused.reasons[r]["examples"])} for r in reasons},
        "file_types_not_read": most_bytes(refused.types, "types"),
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
    *("dataset", "joining the dataset", 5, one_unit, assemble),
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

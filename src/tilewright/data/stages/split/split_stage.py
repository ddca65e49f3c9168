"""Which records are held out: whole clusters of near-copies and equal texts, some of every domain (`split.holdout`).

Clusters that are a large part of a domain are divided inside, as in any other data (`split.divide_clusters`).

Before that, a limit on the text: small domains give everything, large ones share the rest equally, and which records of
a domain stay is a seeded hash's choice. Images and sounds without a text are held out by their number; so are those of
a domain of which all text is too little to hold a part out: its text goes, its images stay, with their captions.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xxhash

from tilewright.core.errors import DataError
from tilewright.data.common.hashing import hash64
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import SplitSection
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import AddedSetting, Every, FoundValue, NoEffect, Only, one_unit
from tilewright.data.engine.record_tables import batches, rows
from tilewright.data.sources.path_purpose import wanted_build
from tilewright.data.stages.chat.chat_settings import TEXT
from tilewright.data.stages.copies.exact_copies import doc_of, row_of, shard_of
from tilewright.data.stages.copies.minhash import components
from tilewright.data.stages.split.divide_clusters import divide_clusters, largest_share
from tilewright.data.stages.split.holdout import choose_holdout
from tilewright.data.stages.stage_order import encoding, last_kept, rejecting

TRAIN, HELD, DROPPED, LEFT, SHOWN, SHOWN_HELD = range(6)
"""Where a record goes: both splits; out, for its domain or the limit; both splits, without tokens of its caption."""


@dataclass(frozen=True)
class Refused:
    """The records that the stages before have dropped, for the error where too little is left.

    Args:
        source: of the build.
        format: `chat.format`.
        folders: of the units that wrote rejects.
    """

    source: str
    format: str
    folders: list[Path]

    def error(self, num: int) -> DataError:
        """The error of a refused split: too little text for both parts: `num` records are left."""
        counts: Counter[str] = Counter()
        stages: set[str] = set()
        for folder in self.folders:
            for row in rows(folder / "rejects.parquet"):
                stages.add(row["stage"])
                counts[f"{row['path']}: {row['rule']}" if row["stage"] == "read" else row["rule"]] += row["count"]
        lines = [f"{rule} ({count:,}x)" for rule, count in counts.most_common(5)]
        if not num and stages <= {"read"}:
            return wanted_build(self.format).unusable(self.source, "\n".join(lines) or "no record")
        return DataError(
            "Too little text for a training and a held-out part",
            where=self.source,
            got="\n".join([f"{num} records that pass the rules and are no copies; dropped were:", *lines]),
            need="two different records" + (", or one of a few hundred bytes" if self.format == TEXT else ""),
            try_="fewer or weaker rules than those that dropped most, or more files in read.source",
        )


@dataclass(frozen=True)
class _Documents:
    """All records that stay, as `choose_holdout` wants them."""

    domains: tuple[str, ...]
    docs: np.ndarray
    domain_of: np.ndarray
    lengths: np.ndarray
    is_media: np.ndarray
    texts: np.ndarray
    """Hash of the text of each, uint64."""
    repaired: Sequence[Path]

    def where(self, stays: np.ndarray) -> "_Documents":
        """Documents of the split for which `stays` (bool) is true."""
        docs, domain_of, lengths = self.docs[stays], self.domain_of[stays], self.lengths[stays]
        is_media, texts = self.is_media[stays], self.texts[stays]
        return _Documents(self.domains, docs, domain_of, lengths, is_media, texts, self.repaired)

    def __len__(self) -> int:
        return len(self.docs)

    def data_of(self, index: int) -> bytes:
        return self.texts_of(np.array([index]))[0].tobytes()

    def texts_of(self, members: np.ndarray) -> list[np.ndarray]:
        """UTF-8 bytes (uint8) of the split's records with these indices; only the row groups that hold them are
        read."""
        shards, rows_ = shard_of(self.docs[members]).astype(np.int64), row_of(self.docs[members])
        found: dict[int, np.ndarray] = {}
        for shard in np.unique(shards).tolist():
            mine = np.flatnonzero(shards == shard)
            file = pq.ParquetFile(self.repaired[shard] / "records.parquet")
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            begins = np.append(0, np.cumsum(sizes))
            group_of = np.searchsorted(begins, rows_[mine], side="right") - 1
            for group in np.unique(group_of).tolist():
                column = file.read_row_group(group, ["text"])["text"]
                for at in mine[group_of == group].tolist():
                    text = column[int(rows_[at] - begins[group])].as_py()
                    found[at] = np.frombuffer(text.encode(), np.uint8)
        return [found[at] for at in range(len(members))]


def split_records(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    kept: Sequence[Path],
    records: Sequence[Path],
    domain_of_shard: list[str],
    clusters: Path,
    refused: Refused,
    format: str,
) -> Mapping[str, Any]:
    """Split records: write where each goes: `NNNNN.npy` per shard (uint8, one per row of its side table) and
    `split.json`.

    `split.json` has `cut` (record -> byte where its held-out tail begins), domains that are dropped, and notes. Records
    that are left out by the limit go to `LEFT`, those of a domain that is too small to `DROPPED`.

    Raises:
        DataError: too little text for both parts.
    """
    # 1. The limit on text, before anything is held out.
    section, domains = settings.split, tuple(sorted(set(domain_of_shard)))
    every = _all_kept(kept, records, domains, domain_of_shard)
    if not len(every):
        raise refused.error(0)
    stays = within(every.domain_of, every.lengths, every.docs, section)
    found = every.where(stays)
    if not len(found):
        raise refused.error(0)
    # 2. Whole clusters are held out, so that no copy of a held-out text is trained on.
    cluster_of, notes_of_groups = _divided(found, _clusters(found, clusters), section)
    split = choose_holdout(found, cluster_of, section.holdout, section.seed, may_cut=format == TEXT)
    # 3. Text of domains that are too small goes; their images and sounds stay, without tokens of their captions.
    where = np.full(len(every), LEFT, np.uint8)
    dropped = np.isin(found.domain_of, split.dropped) & (found.lengths > 0)
    part = np.where(split.held, HELD, TRAIN).astype(np.uint8)
    part[dropped] = np.where(found.is_media[dropped], SHOWN, DROPPED)
    # 4. Media without tokens are held out by their number.
    held = _held_media(found, (found.lengths == 0) | (part == SHOWN), section)
    part[held] = np.where(part[held] == SHOWN, SHOWN_HELD, HELD)
    where[stays] = part
    if not np.isin(where, (TRAIN, SHOWN)).any() or not (np.isin(where, (HELD, SHOWN_HELD)).any() or split.cut):
        raise refused.error(len(found))
    # 5. A file per shard: later stages read their own only.
    shards = shard_of(every.docs)
    for shard in range(len(kept)):
        first, stop = np.searchsorted(shards, [shard, shard + 1])
        np.save(folder / f"{shard:05}.npy", where[first:stop])
    notes = {
        "cut": {str(int(found.docs[i])): at for i, at in sorted(split.cut.items())},
        "dropped": sorted(domains[i] for i in split.dropped),
        "notes": [*split.notes, *notes_of_groups, *_shown(found, part)],
    }
    (folder / "split.json").write_text(json.dumps(notes, indent=1, sort_keys=True))
    counts = {name: int((where == code).sum()) for name, code in (("train", TRAIN), ("holdout", HELD), ("left", LEFT))}
    return counts | {"holdout": counts["holdout"] + len(split.cut)}


def _all_kept(
    kept: Sequence[Path], repaired: Sequence[Path], domains: tuple[str, ...], domain_of_shard: list[str]
) -> _Documents:
    """All records to split that the stages before have kept."""
    docs, domain_of = [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)]
    lengths, is_media = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    texts = [np.zeros(0, np.uint64)]
    for shard, (side, records) in enumerate(zip(kept, repaired, strict=True)):
        captions = _captions(records)
        for _, batch in batches(side / "kept.parquet", ("row", "bytes", "digest")):
            row = np.array(batch["row"], np.int64)
            docs.append(doc_of(shard, row))
            lengths.append(np.array(batch["bytes"], np.int64))
            domain_of.append(np.full(len(row), domains.index(domain_of_shard[shard]), np.int32))
            is_media.append(np.array([number in captions for number in batch["row"]], bool))
            pairs = zip(batch["row"], batch["digest"], strict=True)
            digests = [captions.get(number) or digest for number, digest in pairs]
            texts.append(np.frombuffer(b"".join(digests), "<u8")[::2])
    columns = [np.concatenate(parts) for parts in (docs, domain_of, lengths, is_media, texts)]
    return _Documents(domains, *columns, repaired=repaired)


def _captions(records: Path) -> dict[int, bytes]:
    """Captions beside the split: row of each image and sound of a shard -> digest of its text. The digest of a text
    record is that of its text."""
    found = {}
    for first, batch in batches(records / "records.parquet", ("modality",)):
        if any(modality != "text" for modality in batch["modality"]):
            found |= {first + i: b"" for i, modality in enumerate(batch["modality"]) if modality != "text"}
    if found:
        for first, batch in batches(records / "records.parquet", ("text",)):
            for i, text in enumerate(batch["text"]):
                if first + i in found:
                    found[first + i] = xxhash.xxh3_128_digest(text.encode())
    return found


def _shown(found: _Documents, part: np.ndarray) -> list[str]:
    """A note of the split on images and sounds whose captions are not trained on."""
    shown = np.isin(part, (SHOWN, SHOWN_HELD))
    counts = np.bincount(found.domain_of[shown], minlength=len(found.domains)).tolist()
    why = "captioned images or sounds stay without tokens: the text of the domain is too little to hold a part out"
    return [f"{name}: {count} {why}" for name, count in zip(found.domains, counts, strict=True) if count]


def _held_media(found: _Documents, silent: np.ndarray, settings: SplitSection) -> np.ndarray:
    """Held-out media of the split: images and sounds without tokens (`silent`): of two of a domain one at least, and
    never all."""
    held = [np.zeros(0, np.int64)]
    order = np.argsort(hash64(settings.seed, found.docs), kind="stable")
    order = order[silent[order]]
    for domain in range(len(found.domains)):
        mine = order[found.domain_of[order] == domain]
        held.append(mine[: min(len(mine) - 1, max(1, round(settings.holdout * len(mine))))] if len(mine) else mine)
    return np.concatenate(held)


def within(domain_of: np.ndarray, lengths: np.ndarray, docs: np.ndarray, settings: SplitSection) -> np.ndarray:
    """Records of the split within `settings.max_bytes`, bool: all where it is 0.

    Example:
        >>> domain_of, lengths = np.array([0, 0, 0, 1]), np.array([50, 50, 50, 20])
        >>> stays = within(domain_of, lengths, np.arange(4), SplitSection(max_bytes=125))
        >>> int(stays[:3].sum()), bool(stays[3])
        (2, True)
    """
    left = settings.max_bytes
    stays = (lengths == 0) if left else np.ones(len(docs), bool)  # images and sounds without a text are no bytes of it
    sizes = np.bincount(domain_of, lengths)
    order = np.argsort(hash64(settings.seed, docs.astype(np.uint64)), kind="stable")
    by_size = [domain for domain in np.argsort(sizes, kind="stable").tolist() if sizes[domain]]
    for number, domain in enumerate(by_size if left else []):
        mine = order[domain_of[order] == domain]
        share = free = left // (len(by_size) - number)
        for doc, size in zip(mine.tolist(), lengths[mine].tolist(), strict=True):
            if size <= free:
                stays[doc] = True
                free -= size
        left -= share - free
    return stays


def _clusters(found: _Documents, path: Path) -> np.ndarray:
    """Clusters of the split: of each record that of its near-copies, and of what has the same text, such as images with
    one caption."""
    docs, known = found.docs, np.load(path / "clusters.npy", allow_pickle=False)
    cluster = docs.copy()
    at = np.searchsorted(docs, known["doc"])
    here = (at < len(docs)) & (docs[np.minimum(at, len(docs) - 1)] == known["doc"])
    cluster[at[here]] = known["cluster"][here]
    names, number = np.unique(cluster, return_inverse=True)
    order = np.argsort(found.texts, kind="stable")
    order = order[found.lengths[order] > 0]
    same = found.texts[order[1:]] == found.texts[order[:-1]]
    joined = components(len(names), number[order[:-1][same]], number[order[1:][same]])
    return names[joined[number]].astype(np.int64)


def _divided(found: _Documents, cluster_of: np.ndarray, settings: SplitSection) -> tuple[np.ndarray, list[str]]:
    """The split's clusters, with those divided that are too large to be held out whole, and what is to be said of
    it."""
    _, first, number = np.unique(cluster_of, return_index=True, return_inverse=True)
    whole = first[number]
    share = largest_share(settings.holdout)
    divided = divide_clusters(found.texts_of, found.lengths, whole, found.domain_of.astype(np.int64), share)
    several = np.isin(whole, whole[divided.cluster_of != whole])  # named by the first record of each part
    names = np.where(several, found.docs[divided.cluster_of].astype(np.int64), cluster_of)
    return names, divided.notes(found.domains)


def source_label(c: Context) -> str:
    """Label of a split's sources, for a person: without the `..` of a data.toml that lies in another folder."""
    sources = list(c.build.read.sources.values()) or [c.build.read.source]
    return ", ".join(str(Path(source).resolve()) if ".." in Path(source).parts else source for source in sources)


def _refused(c: Context, i: int) -> Refused:
    """The text of the error of a refused split."""
    before = [name for name in rejecting(c.build) if name != encoding(c.build)]
    return Refused(
        source_label(c),
        c.build.chat.format,
        [c.folder(stage, shard) for stage in before for shard in range(c.num_shards)],
    )


SPLIT = BuildStage(
    *("split", "holding out", 7, one_unit, split_records, ("split",)),
    {
        "kept": Every(last_kept),
        "records": Every("repair"),
        "domain_of_shard": FoundValue(lambda c, i: c.listing.domains()),
        "clusters": Only("near"),
        "refused": NoEffect(_refused),
        "format": AddedSetting("chat.format"),
    },
)

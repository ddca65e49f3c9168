"""The tokenizer, and the token streams of each shard with a row for every run of tokens in them.

A run is a record, or a window of it; runs of the training and of the held-out part go into streams of their own. The
rows are the dataset's records: with the text of the run's targets, and the place of its record in the files.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import tokenizers

from tilewright.core.atomic_io import hash_file
from tilewright.data.common.encoder import FAILS, Spared, choose_encoder, in_batches, with_ranks
from tilewright.data.common.guarded_tokenizer import TokenizerError
from tilewright.data.common.npy_writer import NpyWriter, token_dtype
from tilewright.data.common.ranked_bpe import tiktoken_version
from tilewright.data.common.record_filter import DropReason
from tilewright.data.common.records import LIMIT, TOO_SMALL
from tilewright.data.common.tokenizer import Tokenizer, load_tokenizer, train_tokenizer, training_sample
from tilewright.data.common.tokenizer_folder import tokenizer_files
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_settings import ChunkSection
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Every, NoEffect, Only, Same, StageInput, one_unit, per_shard
from tilewright.data.engine.record_tables import RECORDS, REJECTS, TableWriter, batches, rows
from tilewright.data.stages.copies.exact_copies import doc_of, row_of, shard_of
from tilewright.data.stages.kept_records import SCORES, reject_of
from tilewright.data.stages.split.split_stage import DROPPED, HELD, LEFT, SHOWN, SHOWN_HELD, TRAIN
from tilewright.data.stages.stage_order import last_kept
from tilewright.data.stages.text.token_windows import Window, windows

SPLIT_NAMES = {TRAIN: "train", HELD: "holdout"}
RUNS = pa.schema(
    [
        *RECORDS,
        *(pa.field(name, pa.int64()) for name in ("bytes", "tokens", "length", "context", "cluster")),
    ]
)
"""A record of the dataset; `bytes` and `tokens` of its text, `length` of its run in the stream, `context` positions of
that which repeat the run before, `cluster` of near-copies."""

UNUSED = {DROPPED: DropReason(TOO_SMALL, 1.0, 2.0), LEFT: DropReason(LIMIT, "", "split.max_bytes")}
"""Part of a record that neither split has -> why it is not used."""
ENCODER = "encoder.json"
_BATCH, _BATCH_BYTES = 256, 1 << 20
"""Records that are encoded together, and bytes of them: until its ids are taken a token has some 100 bytes."""


@dataclass(frozen=True)
class KeptText:
    """A text that stays: its record, the number of that over all shards, the part it goes to, and its UTF-8 bytes."""

    record: dict[str, Any]
    doc: int
    part: int
    data: bytes


@dataclass(frozen=True)
class Shard:
    """Where a shard's records are (`repaired`), which of them stay (`kept`), and where each goes (`split`)."""

    number: int
    repaired: Path
    kept: Path
    split: Path

    def texts(self) -> Iterator[KeptText]:
        """All texts of a shard to encode that stay so far; a record whose tail is held out comes twice."""
        cut = {int(doc): at for doc, at in json.loads((self.split / "split.json").read_bytes())["cut"].items()}
        where = np.load(self.split / f"{self.number:05}.npy", allow_pickle=False)
        alive = zip(rows(self.kept / "kept.parquet"), where.tolist(), strict=True)
        side, part = next(alive, (None, 0))
        base = int(doc_of(self.number, np.zeros(1, np.int64))[0])
        for first, batch in batches(self.repaired / "records.parquet"):
            stop = first + len(batch["id"])
            while side is not None and side["row"] < stop:
                record = {name: column[side["row"] - first] for name, column in batch.items()}
                record["language"] = side["language"]
                record["scores"] = with_scores(record["scores"], side)
                data = record["text"].encode()
                doc = base + side["row"]
                if doc in cut:
                    yield KeptText(record, doc, TRAIN, data[: cut[doc]])
                    yield KeptText(record, doc, HELD, data[cut[doc] :])
                else:
                    yield KeptText(record, doc, part, data)
                side, part = next(alive, (None, 0))


def with_scores(scores: str, side: Mapping[str, Any]) -> str:
    """Scores of an encoded record, a JSON object, with those of its row in the side table.

    Example:
        >>> with_scores('{"language": 0.5}', {"quality": 0.25, "contrast": None, "bits_per_byte": None})
        '{"language": 0.5, "quality": 0.25}'
    """
    found = {name: round(side[name], 5) for name in SCORES if side[name] is not None}
    return json.dumps(json.loads(scores) | found, sort_keys=True) if found else scores


def _shards_of(records: Sequence[Path], kept: Sequence[Path], split: Path) -> list[Shard]:
    return [Shard(number, *pair, split) for number, pair in enumerate(zip(records, kept, strict=True))]


def make_tokenizer(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Sequence[Path],
    kept: Sequence[Path],
    split: Path,
    given: str,
) -> Mapping[str, Any]:
    """Make the tokenizer to encode with: train it on a sample of the training text, or copy the given one, into
    `folder`/tokenizer."""
    if given:
        tokenizer = load_tokenizer(given)
    else:
        sample = _sample(_shards_of(records, kept, split), settings.split.seed)
        tokenizer = train_tokenizer(sample, settings.tokenizer.vocab_size)
    tokenizer.save(folder / "tokenizer")
    return {"vocab_size": tokenizer.vocab_size}


def _sample(shards: list[Shard], seed: int) -> Iterator[str]:
    """Sample of the training texts for the tokenizer that encodes them, see `training_sample`."""
    docs, sizes = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for shard in shards:
        where = np.load(shard.split / f"{shard.number:05}.npy", allow_pickle=False)
        kept = [batch for _, batch in batches(shard.kept / "kept.parquet", ("row", "bytes"))]
        row = np.array([r for batch in kept for r in batch["row"]], np.int64)
        size = np.array([b for batch in kept for b in batch["bytes"]], np.int64)
        docs.append(doc_of(shard.number, row[where == TRAIN]))
        sizes.append(size[where == TRAIN])
    every = np.concatenate(docs)
    chosen = every[training_sample(np.concatenate(sizes), seed)]
    for shard in shards:
        wanted = row_of(chosen[shard_of(chosen) == shard.number])
        if not len(wanted):
            continue
        cut = json.loads((shard.split / "split.json").read_bytes())["cut"]
        for first, batch in batches(shard.repaired / "records.parquet", ("text",)):
            inside = wanted[(wanted >= first) & (wanted < first + len(batch["text"]))]
            for row in inside.tolist():
                at = cut.get(str(int(doc_of(shard.number, np.array([row]))[0])))
                text = batch["text"][row - first]
                yield text if at is None else text.encode()[:at].decode()


def write_encoder(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Sequence[Path],
    kept: Sequence[Path],
    split: Path,
    tokenizer: Path,
) -> Mapping[str, Any]:
    """Write which library encodes the texts of a build into `folder`/encoder.json; ids are the same with each."""
    texts = _sample(_shards_of(records, kept, split), settings.split.seed)
    num_bytes = 0
    for side in kept:
        num_bytes += sum(sum(batch["bytes"]) for _, batch in batches(side / "kept.parquet", ("bytes",)))
    _, name = choose_encoder(load_tokenizer(tokenizer / "tokenizer"), num_bytes, texts)
    (folder / ENCODER).write_text(json.dumps({"encoder": name}))
    return {}


def encoder_of(folder: Path) -> str:
    """The encoder that `write_encoder` wrote."""
    return json.loads((folder / ENCODER).read_bytes())["encoder"]


def encode_shard(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Path,
    kept: Path,
    split: Path,
    tokenizer: Path,
    encoder: str,
    clusters: Path,
) -> Mapping[str, Any]:
    """Write both streams of a shard, their rows, and what each held-out token stands for, into `folder`.

    Texts that the tokenizer fails on are rejects. Images and sounds without a text, or in a domain of too little
    text, have no tokens and are in `media.parquet`.
    """
    digests = tuple(hash_file(file) for file in tokenizer_files(tokenizer / "tokenizer"))
    loaded = _loaded(tokenizer / "tokenizer", digests, encoder.startswith("tiktoken"))
    spared, shard = Spared(), Shard(index, records, kept, split)
    with ExitStack() as files:
        parts = {
            part: _Part(files, folder, name, loaded, settings.chunk, spared, sized=part == HELD)
            for part, name in SPLIT_NAMES.items()
        }
        media = files.enter_context(TableWriter(folder / "media.parquet", RUNS))
        rejects = files.enter_context(TableWriter(folder / "rejects.parquet", REJECTS))
        cluster_of = clusters_of(clusters, index)
        for batch in in_batches(shard.texts(), lambda text: len(text.data), _BATCH, _BATCH_BYTES):
            for text in batch:
                if text.part in UNUSED:
                    rejects.append(reject_of(text.record, "split", UNUSED[text.part], len(text.data)))
                elif not text.data or text.part in (SHOWN, SHOWN_HELD):
                    media.append(text.record)
            for part, into in parts.items():
                mine = [text for text in batch if text.part == part and text.data]
                for text, why in into.add(mine, cluster_of) if mine else ():
                    rejects.append(reject_of(text.record, "encode", DropReason(FAILS, why), len(text.data)))
        counts: dict[str, Any] = {"rejects": rejects.num_rows, "media": media.num_rows}
        for into in parts.values():
            counts |= {into.name: into.runs.num_rows, f"{into.name}_tokens": into.num_tokens}
    return counts


def clusters_of(clusters: Path, shard: int) -> dict[int, int]:
    """Map the records of a shard, by number, to their clusters of near-copies; a record that is missing is its own
    cluster."""
    known = np.load(clusters / "clusters.npy", allow_pickle=False)
    known = known[shard_of(known["doc"]) == shard]
    return dict(zip(known["doc"].tolist(), known["cluster"].tolist(), strict=True))


@lru_cache(maxsize=1)
def _loaded(folder: Path, digests: tuple[str, ...], quick: bool) -> Tokenizer:
    """The tokenizer to encode with, loaded once for all shards that a process encodes: the words that it remembers are
    a third of the work. `digests` say of which content; `quick`: tiktoken encodes, where this process has it."""
    tokenizer = load_tokenizer(folder)
    found = with_ranks(tokenizer) if quick else ""
    return found if isinstance(found, Tokenizer) else tokenizer


class _Part:
    """The files of one part of the dataset in one shard."""

    def __init__(
        self,
        files: ExitStack,
        folder: Path,
        name: str,
        tokenizer: Tokenizer,
        chunk: ChunkSection,
        spared: Spared,
        *,
        sized: bool,
    ):
        def stream(suffix: str, dtype: np.dtype) -> NpyWriter:
            return files.enter_context(NpyWriter(folder / f"{name}{suffix}.npy", dtype))

        self.name, self.num_tokens = name, 0
        self.runs = files.enter_context(TableWriter(folder / f"{name}.parquet", RUNS))
        self._tokenizer, self._chunk, self._spared = tokenizer, chunk, spared
        self._tokens = stream("", token_dtype(tokenizer.vocab_size))
        self._sizes = stream(".bytes", np.dtype("<u4")) if sized else None
        masked = chunk.tokens and chunk.overlap_loss == "context"
        self._trained = stream(".trained", np.dtype("u1")) if masked else None

    def add(self, texts: list[KeptText], cluster_of: Mapping[int, int]) -> Iterator[tuple[KeptText, str]]:
        """Add to a part: encode `texts` and write their runs; yields those that the tokenizer fails on, and what it
        said.

        Args:
            texts: of this part.
            cluster_of: the cluster of a record by its number; one that has no near-copy is its own.
        """
        strings = [text.data.decode() for text in texts]
        if self._sizes is None and not self._chunk.tokens:  # no caller asks which bytes a token stands for
            for text, ids in zip(texts, self._spared.encoded(self._tokenizer.encode_batch, strings), strict=True):
                if isinstance(ids, TokenizerError):
                    yield text, ids.problems[0].got
                    continue
                self._run(text, cluster_of, self._stream(ids), Window(0, 1, len(ids) + 2), 0, text.data)
            return
        for text, found in zip(texts, self._spared.encoded(self._tokenizer.encode_sized, strings), strict=True):
            if isinstance(found, TokenizerError):
                yield text, found.problems[0].got
                continue
            ids, sizes = found
            num, overlap = self._chunk.tokens, self._chunk.overlap
            spans = windows(text.data, sizes, num, overlap) if num else [Window(0, 1, len(ids) + 2)]
            stream, stood = self._stream(ids), [0, *sizes, 0]
            for number, span in enumerate(spans):
                first, stop = (sum(stood[: span.target]) if number else 0), sum(stood[: span.stop])
                self._run(text, cluster_of, stream, span, number, text.data[first:stop])
                if self._sizes is not None:  # what has no label stands for no text
                    repeats = span.target - span.start if number and self._trained is not None else 0
                    self._sizes.append([0] * repeats + stood[span.start + repeats : span.stop])

    def _stream(self, ids: list[int]) -> list[int]:
        return [self._tokenizer.bos_id, *ids, self._tokenizer.eos_id]

    def _run(
        self, text: KeptText, cluster_of: Mapping[int, int], ids: list[int], span: Window, number: int, data: bytes
    ) -> None:
        """Write one encoded run of a text: its stream positions `span` of `ids`, whose targets stand for the bytes
        `data`."""
        context = span.target - span.start if number else 0
        tokens = span.stop - span.target - (span.stop == len(ids))
        self.num_tokens += tokens
        self.runs.append(
            text.record
            | {
                "text": data.decode(),
                "chunk": number,
                "bytes": len(data),
                "tokens": tokens,
                "length": span.stop - span.start,
                "context": context,
                "cluster": cluster_of.get(text.doc, text.doc),
            }
        )
        self._tokens.append(ids[span.start : span.stop])
        if self._trained is not None:
            self._trained.append([0] * context + [1] * (span.stop - span.start - context))


class GivenTokenizer(StageInput):
    """The tokenizer that `tokenizer.path` names, known by the content of its files; "" where one is trained."""

    def identity(self, c: Context, i: int) -> object:
        path = c.build.tokenizer.path
        return [f"{file.name}:{hash_file(file)}" for file in tokenizer_files(Path(path))] if path else []

    def value(self, c: Context, i: int) -> str:
        return c.build.tokenizer.path


def of_text(units: Callable[[Context], int]) -> Callable[[Context], int]:
    """Units of a stage that encodes text, which builds of conversations do not have."""
    return lambda c: 0 if c.build.chat.is_on else units(c)


_TEXTS = {"records": Every("repair"), "kept": Every(last_kept), "split": Only("split")}

TOKENIZER = BuildStage(
    *("tokenizer", "training the tokenizer", 1, one_unit, make_tokenizer, ("tokenizer.vocab_size", "split.seed")),
    _TEXTS | {"given": GivenTokenizer()},
    lambda: (tokenizers.__version__,),
)
ENCODER_CHOICE = BuildStage(
    *("encoder", "choosing the encoder", 1, of_text(one_unit), write_encoder, ("split.seed",)),
    _TEXTS | {"tokenizer": Only("tokenizer")},
    lambda: (tokenizers.__version__, tiktoken_version()),
)
ENCODE = BuildStage(
    *("encode", "encoding", 4, of_text(per_shard), encode_shard, ("chunk",)),
    {
        "records": Same("repair"),
        "kept": Same(last_kept),
        "split": Only("split"),
        "tokenizer": Only("tokenizer"),
        "encoder": NoEffect(lambda c, i: encoder_of(c.folder("encoder"))),  # ids are the same with each
        "clusters": Only("near"),
    },
    lambda: (tokenizers.__version__,),
)

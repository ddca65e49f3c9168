"""Conversations to token streams: the tokenizer with the template, and of each shard the streams, with a row for every
rendering in them.

The files are those of `stages.encode_records`, and beside each stream a mask, which says what of it is trained.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
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
from tilewright.core.errors import DataError
from tilewright.data.chat.chat_rows import PREFERENCES
from tilewright.data.chat.load import named_tokens, template_source
from tilewright.data.chat.row_renderer import NUM_EXAMPLES, ROWS, ROWS_BYTES, RowRenderer, example_of
from tilewright.data.chat.template import ChatTemplate
from tilewright.data.chat.trained_tokens import ChatSample, Rendered
from tilewright.data.common.encoder import in_batches
from tilewright.data.common.npy_writer import NpyWriter, token_dtype
from tilewright.data.common.record_filter import DropReason
from tilewright.data.common.tokenizer import load_tokenizer
from tilewright.data.common.tokenizer_folder import tokenizer_files
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.build_stage import BuildStage
from tilewright.data.engine.declared_inputs import Only, Same, StageInput
from tilewright.data.engine.record_tables import REJECTS, TableWriter
from tilewright.data.stages.chat.conversation_records import conversation_of, shapes_by_file
from tilewright.data.stages.encode_records import RUNS, SPLIT_NAMES, UNUSED, KeptText, Shard, clusters_of
from tilewright.data.stages.kept_records import reject_of
from tilewright.data.stages.stage_order import last_kept

SETTING = "chat.template"
RENDERINGS = pa.schema([*RUNS, *(pa.field(name, pa.int64()) for name in ("trained", "first", "document"))])
"""A rendering of a conversation: `trained` tokens of it, the `first` of them, and the number of the conversation, which
several renderings may share. `bytes` are those of what is said, in the first rendering of a conversation."""
EXAMPLE = "example.json"


@dataclass(frozen=True)
class GivenTemplate:
    """A template, and what it may call `bos_token`, `eos_token` and so on."""

    source: str
    tokens: tuple[tuple[str, str], ...]
    where: str

    def chat(self, tokenizer: Path) -> ChatTemplate:
        """The chat template of a build with the tokenizer of a folder, to render conversations."""
        return ChatTemplate(self.source, load_tokenizer(tokenizer), dict(self.tokens), self.where, SETTING)


class NamedTemplate(StageInput):
    """The template that the settings name, known by its text and the names of tokens."""

    def identity(self, c: Context, i: int) -> object:
        given = self.value(c, i)
        return [given.source, given.tokens]

    def value(self, c: Context, i: int) -> GivenTemplate:
        return c.once("template", lambda: given_template(c.build.chat.template, c.build.tokenizer.path))


def given_template(chosen: str, folder: str) -> GivenTemplate:
    """The template of a build by which conversations are rendered.

    Args:
        chosen: `chat.template`.
        folder: `tokenizer.path`.

    Raises:
        ConfigError: there is none.
        DataError: a file that cannot be read.
    """
    source, where = template_source(chosen, folder, SETTING)
    return GivenTemplate(source, tuple(sorted(named_tokens(Path(folder)).items())) if folder else (), where)


def add_template(
    index: int, settings: SimpleNamespace, folder: Path, *, tokenizer: Path, given: GivenTemplate
) -> Mapping[str, Any]:
    """Add the template to render by: write the tokenizer with it beside it into `folder`/tokenizer.

    Raises:
        DataError: it is no template.
    """
    shutil.copytree(tokenizer / "tokenizer", folder / "tokenizer")
    given.chat(folder / "tokenizer").save(folder / "tokenizer")
    return {}


def render_shard(
    index: int,
    settings: SimpleNamespace,
    folder: Path,
    *,
    records: Path,
    kept: Path,
    split: Path,
    template: Path,
    given: GivenTemplate,
    clusters: Path,
) -> Mapping[str, Any]:
    """Render a shard's conversations: write both streams, their masks and rows, and a rendered example, into `folder`.
    Conversations that the template does not render whole are rejects.

    Args:
        index: of the shard.
        settings: chat.format.
        folder: gets the files.
        records, kept, split: as in `encode_records.Shard`.
        template: folder of the tokenizer.
        given: the template.
        clusters: folder of the clusters of near-copies.

    Raises:
        TemplateTooMuchError: more than three conversations take too much time or memory.
        TokenizerError: the tokenizer fails on too many.
    """
    # 1. The template with the tokenizer: a process loads them once for all its shards, by content.
    digests = tuple(hash_file(file) for file in tokenizer_files(template / "tokenizer"))
    chat = _loaded(given, template / "tokenizer", digests)
    renderer = RowRenderer(chat, pairs=settings.chat.format == PREFERENCES)
    left_out: Counter[str] = Counter()
    examples: list[ChatSample] = []
    with ExitStack() as files:
        dtype = token_dtype(chat.tokenizer.vocab_size)
        parts = {part: _Part(files, folder, name, dtype) for part, name in SPLIT_NAMES.items()}
        files.enter_context(TableWriter(folder / "media.parquet", RUNS))
        rejects = files.enter_context(TableWriter(folder / "rejects.parquet", REJECTS))
        cluster_of = clusters_of(clusters, index)
        texts = Shard(index, records, kept, split).texts()
        # 2. Conversations in batches. Those of no split are rejects; those of which rendering fails, too.
        for batch in in_batches(texts, lambda text: len(text.record["facts"]), ROWS, ROWS_BYTES):
            for text in (text for text in batch if text.part in UNUSED):
                rejects.append(reject_of(text.record, "split", UNUSED[text.part], len(text.data)))
            mine = [text for text in batch if text.part in parts]
            rows = [conversation_of(text.record["facts"]) for text in mine]
            for text, rendered in zip(mine, renderer.render(rows), strict=True):
                if isinstance(rendered, DataError):
                    problem = rendered.problems[0]
                    reason = DropReason(problem.what, problem.got)
                    rejects.append(reject_of(text.record, "render", reason, len(text.data)))
                    continue
                parts[text.part].add(text, rendered, cluster_of.get(text.doc, text.doc))
                left_out.update(rendered.left_out)
                if len(examples) < NUM_EXAMPLES:
                    examples += rendered.samples
        # 3. What the unit counts, and an example to look at.
        counts: dict[str, Any] = {"rejects": rejects.num_rows, "left_out": dict(left_out)}
        for into in parts.values():
            counts |= {into.name: into.rows.num_rows, f"{into.name}_tokens": into.counts["tokens"]}
    (folder / EXAMPLE).write_text(json.dumps(example_of(examples), ensure_ascii=False), encoding="utf-8")
    total = sum((into.counts for into in parts.values()), Counter())
    return counts | {"answers": {name: total[name] for name in ("rendered_again", "saved_tokens")}}


@lru_cache(maxsize=1)
def _loaded(given: GivenTemplate, folder: Path, digests: tuple[str, ...]) -> ChatTemplate:
    """The loaded template to render by with the tokenizer in `folder`, whose files have these digests, once for all
    shards that a process renders."""
    return given.chat(folder)


class _Part:
    """The files of one part of the dataset in one shard."""

    def __init__(self, files: ExitStack, folder: Path, name: str, dtype: np.dtype):
        self.name, self.counts = name, Counter[str]()
        self.rows = files.enter_context(TableWriter(folder / f"{name}.parquet", RENDERINGS))
        self._ids = files.enter_context(NpyWriter(folder / f"{name}.npy", dtype))
        self._trained = files.enter_context(NpyWriter(folder / f"{name}.trained.npy", np.dtype("u1")))

    def add(self, text: KeptText, rendered: Rendered, cluster: int) -> None:
        """Add to a rendered part all renderings of a conversation."""
        for number, sample in enumerate(rendered.samples):
            self._ids.append(sample.ids_T)
            self._trained.append(sample.trained_T)
            self.counts.update({"tokens": len(sample.ids_T), "saved_tokens": sample.saved})
            place = {"document": text.doc, "cluster": cluster, "chunk": number, "context": 0}
            size = 0 if number else len(text.data)
            length = {"bytes": size, "tokens": len(sample.ids_T), "length": len(sample.ids_T)}
            mask = {"trained": int(sample.trained_T.sum()), "first": int(np.argmax(sample.trained_T))}
            self.rows.append(text.record | {"text": sample.text} | place | length | mask)
        self.counts["rendered_again"] += len(rendered.samples) - 1


class ChatFacts(StageInput):
    """Facts of conversations for the summary of a dataset; {} of text."""

    def counts(self, c: Context) -> bool:
        return c.build.chat.is_on

    def identity(self, c: Context, i: int) -> object:
        return self.value(c, i)

    def value(self, c: Context, i: int) -> dict[str, Any]:
        if not c.build.chat.is_on:
            return {}
        not_read = Counter(c.totals("read", "not_read")) + Counter(c.totals(RENDER.name, "left_out"))
        answers = c.totals(RENDER.name, "answers")
        if c.build.chat.format == PREFERENCES:
            answers["rendered_again"] = 0  # a pair is two
        return {
            "shapes": shapes_by_file(c.totals("read", "shapes")),
            "template": TEMPLATE.inputs["given"].value(c, 0).where,
            "not_read": dict(not_read.most_common()),
            **answers,
        }


TEMPLATE = BuildStage(
    *("template", "adding the template", 1, lambda c: int(c.build.chat.is_on), add_template),
    inputs={"tokenizer": Only("tokenizer"), "given": NamedTemplate()},
)
RENDER = BuildStage(
    *("render", "rendering and encoding", 1, lambda c: c.num_shards if c.build.chat.is_on else 0, render_shard),
    ("chat.format",),
    {
        "records": Same("repair"),
        "kept": Same(last_kept),
        "split": Only("split"),
        "template": Only("template"),
        "given": NamedTemplate(),
        "clusters": Only("near"),
    },
    lambda: (tokenizers.__version__,),
)

"""The data of a recipe: which tokenizer makes its ids, whether its rows fit the model, and the prepared rows."""

from collections.abc import Iterator
from typing import Any, Literal

from tilewright.core.config.recipe import DataSection, Recipe
from tilewright.data.chat.chat_rows import PREFERENCES
from tilewright.data.corpus.chat import first_shape
from tilewright.data.dataset.account import account_line
from tilewright.data.dataset.prepared_chat import PreparedChat
from tilewright.data.dataset.prepared_images import PreparedImages
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.data.dataset.remote.prepared_shards import Streaming
from tilewright.data.prepare import prepare
from tilewright.data.sources.path_purpose import wanted
from tilewright.models.folder.find_model import local_folder
from tilewright.training.components.recipe_tokenizer import check_rows, tokenizer_path
from tilewright.training.executor.evaluate import HeldOut

Prepared = PreparedData | PreparedChat | PreparedImages

_OTHER_BYTES, _OTHER_SHARE = 2_000_000, 0.2
"""Of other text: bytes read, and the share of them that may be evaluated."""
_OTHER_PAIRS_BYTES = 400_000
"""Of other preferences: the starting model computes all of them."""
_OTHER_ROWS = 4
"""Rows of each domain of other text that are evaluated. The same ones each time, so their change is that of the model;
it is measured before the first step, where a user waits for it."""


def prepare_data(recipe: Recipe) -> Prepared:
    """Prepare the data of a recipe, or find it prepared; see `data.prepare`. Says in one line what was used and
    refused.

    Raises:
        ConfigError: rows of this data would not fit the model; found before anything is prepared.
        DataError: nothing usable in the source, or a tokenizer that cannot be read.
    """
    check_rows(recipe)
    data = recipe.data
    return prepare(
        data.source,
        sources=data.sources,
        format=data.format,
        chat_template=data.chat_template,
        model_folder=local_folder(recipe.model.path),
        task=recipe.model.task,
        domains=data.domains,
        max_bytes=data.max_bytes,
        holdout=data.holdout,
        validation=_validation(data),
        seq_len=data.seq_len,
        rows=data.rows,
        vocab_size=data.vocab_size,
        tokenizer=tokenizer_path(recipe.model, data),
        text_field=data.text_field,
        image_size=data.image_size,
        cache_dir=data.cache_dir,
        own_process=True,
        streaming=streaming_of(recipe),
    )


def streaming_of(recipe: Recipe) -> Streaming:
    """How the dataset's shards at addresses are read."""
    return Streaming(**recipe.data.streaming.model_dump())


def data_events(prepared: Prepared) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Events about a run's dataset before it begins, as (kind, text, numbers): rows read and refused, and of
    conversations what they look like and what of them is trained."""
    summary = prepared.summary
    yield "data", account_line(summary), {"read": summary["read"], "refused": summary["refused"]}
    if own := summary.get("validation"):
        yield "data", f"held out: {account_line(own)}", {"read": own["read"], "refused": own["refused"]}
    for note in summary.get("notes", ()):
        yield "data", note, {}
    if isinstance(prepared, PreparedChat):
        for line in prepared.preview():
            yield "chat", line, {}


def held_out(recipe: Recipe, prepared: Prepared, num: int | None = None) -> HeldOut:
    """Held-out rows of the dataset, at most `num` batches of each domain (None: the recipe's number); the same on every
    call."""
    rows = 2 if recipe.data.format == "preferences" else 1  # of one sample
    size = max(1, recipe.train.micro_batch_size // rows), num or recipe.train.eval_batches
    return HeldOut(
        {domain: prepared.eval_batches(domain, *size) for domain in prepared.eval_domains},
        {domain: prepared.eval_bytes(domain, *size) for domain in prepared.eval_domains},
    )


def in_parts(recipe: Recipe, prepared: Prepared, whole: HeldOut) -> tuple[HeldOut, HeldOut]:
    """Divide held-out rows into those of evaluations during the run, and the rest, which is empty unless a recipe asks
    for one.

    Args:
        recipe: reads `[train]`.
        prepared: the data.
        whole: its `held_out`.
    """
    num = recipe.train.eval_part_batches
    if not 0 < num < recipe.train.eval_batches:
        return whole, HeldOut({}, {})
    part = held_out(recipe, prepared, num)
    return part, whole.after(part)


def other_data(recipe: Recipe, prepared: Prepared) -> PreparedData | None:
    """The dataset of `data.eval_source` in the ids of the run's tokenizer, a sample of it; None where there is none,
    and where it is what is held out. In a run on conversations or preferences it is read as such where its first row is
    one.

    Raises:
        DataError: nothing usable in it.
    """
    source = recipe.data.eval_source
    if not source or _validation(recipe.data) or not isinstance(prepared, PreparedData) or prepared.task != "causal_lm":
        return None
    format = _other_format(recipe.data)
    text = prepare(
        source,
        format=format,
        chat_template="" if format == "text" else recipe.data.chat_template,
        model_folder="" if format == "text" else local_folder(recipe.model.path),
        max_bytes=_OTHER_PAIRS_BYTES if format == PREFERENCES else _OTHER_BYTES,
        holdout=_OTHER_SHARE,
        seq_len=recipe.data.seq_len,
        tokenizer=str(prepared.tokenizer_folder),
        text_field=recipe.data.text_field,
        cache_dir=recipe.data.cache_dir,
        own_process=True,
        setting="data.eval_source",
    )
    assert isinstance(text, PreparedData)
    return text


def _other_format(data: DataSection) -> Literal["text", "chat", "preferences"]:
    if data.format == "text" or data.eval_source == "installed":
        return "text"
    shape = first_shape(data.eval_source, wanted(data.format, "data.eval_source"))
    if shape == PREFERENCES:
        return PREFERENCES if data.format == PREFERENCES else "text"
    return "chat" if shape else "text"


def other_text(other: PreparedData | None) -> HeldOut:
    """The dataset's rows of `other_data` that are evaluated. Those of preferences have what their loss needs of the
    starting model once `reference_logprobs.attach_reference` was there."""
    if other is None:
        return HeldOut({}, {})
    one_by_one = 1, _OTHER_ROWS
    return HeldOut(
        {domain: other.eval_batches(domain, *one_by_one) for domain in other.eval_domains},
        {domain: other.eval_bytes(domain, *one_by_one) for domain in other.eval_domains},
    )


def _validation(data: DataSection) -> str:
    """The path of the dataset's validation data, the user's own; "" where a share is held out, or nothing."""
    return data.eval_source if not data.holdout and data.eval_source != "installed" else ""


def evaluation_line(recipe: Recipe, *texts: HeldOut) -> str:
    """The line on evaluating the dataset before the first step of loaded weights: it can take longer than a step."""
    batches = (batch for text in texts for rows in text.batches.values() for batch in rows)
    rows = sum(len(batch["labels"]) for batch in batches)
    line = f"before the first step {rows} held-out rows are evaluated"
    if recipe.train.sample_tokens and recipe.model.task == "causal_lm":
        line += f", then samples of at most {recipe.train.sample_tokens} tokens are written"
    return line

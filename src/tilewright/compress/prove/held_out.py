"""The question of a run's proof, and what our own model answers: held-out rows, targets by domain, texts.

Rows are pieces of held-out documents, the longest first, so that a runtime needs no mask between documents.

Legend: S positions  N answers  V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.compress.prove.consumer_session import CACHED_AT
from tilewright.compress.prove.graphs.image_question import ImageQuestion
from tilewright.compress.prove.question import Question
from tilewright.compress.prove.texts.compare_texts import ReferenceTexts
from tilewright.compress.prove.texts.odd_texts import odd_texts
from tilewright.compress.prove.torch_model import all_logits
from tilewright.core.config.recipe import Recipe
from tilewright.core.errors import DataError
from tilewright.data.batches.token_rows import IGNORE
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.models.base.preference import as_rows, is_pairs
from tilewright.models.base.protocols import Model
from tilewright.training.components.recipe_data import Prepared, held_out

_MOST_ANSWERS = 512
_MOST_NUMBERS = 2**21
"""Log-probabilities of one answer file; llama.cpp prints each as text."""
_FEWEST_ANSWERS = 64
_MOST_TEXT = 4_000_000
_MOST_IMAGES = 1024


@dataclass(frozen=True)
class ReferenceAnswer:
    """The answer of our model, with which others are compared. `domains` names the indices in `domain_N`;
    `log_probs_NV` is FP64."""

    domains: tuple[str, ...]
    domain_N: np.ndarray
    labels_N: np.ndarray
    log_probs_NV: np.ndarray


def ask_held_out(
    recipe: Recipe, data: Prepared, tokenizer: Tokenizer, model: Model, vocab_size: int
) -> tuple[Question, ReferenceAnswer, ReferenceTexts]:
    """Make a proof's question from held-out rows: rows, positions and texts, and the model's own answers.

    Raises:
        DataError: nothing is held out, or none of it has a target.
    """
    batches = held_out(recipe, data).batches
    num = max(_FEWEST_ANSWERS, min(_MOST_ANSWERS, _MOST_NUMBERS // vocab_size))
    rows, positions, labels, domain_of = [], [], [], []
    for domain, found in enumerate(batches.values()):
        left = -(-num // len(batches))
        for ids, targets in sorted(_pieces(found), key=lambda piece: len(piece[0]), reverse=True):
            # A server needs room for the token that it predicts, so the last position of a full row is not asked for.
            at = np.flatnonzero(targets[: recipe.data.seq_len - 1] != IGNORE)[:left]
            if not len(at):
                continue
            positions.append(np.stack((np.full(len(at), len(rows)), at), axis=1))
            rows.append(ids[: at[-1] + 1] if recipe.model.task == "causal_lm" else ids)
            labels.append(targets[at])
            domain_of.append(np.full(len(at), domain))
            left -= len(at)
            if not left:
                break
    if not rows:
        raise DataError(
            "No held-out text to prove an export on",
            got=f"0 targets in {sum(map(len, batches.values()))} batches of {', '.join(batches) or 'no domain'}",
            need="a held-out document with two tokens",
            try_="--no-proof, or a run with more data or a larger data.holdout",
            where="data.holdout",
        )
    documents = _texts(data, tokenizer, rows)
    everything = np.concatenate([ids for found in batches.values() for ids, _ in _pieces(found)])
    texts = ReferenceTexts([*documents, *odd_texts()], num_documents=len(documents))
    question = Question(rows, np.concatenate(positions), _long_row(everything, recipe), texts.texts, texts.special)
    expected = ReferenceAnswer(
        tuple(batches), np.concatenate(domain_of), np.concatenate(labels), reference(model, question)
    )
    return question, expected, replace(texts, token_ids=tokenizer.encode_batch(texts.texts))


def ask_images(recipe: Recipe, data: Prepared, model: Model) -> tuple[ImageQuestion, ReferenceAnswer]:
    """Ask held-out images of a proof, and the answers of the model.

    Raises:
        DataError: nothing is held out.
    """
    ((domain, batches),) = held_out(recipe, data, -(-_MOST_IMAGES // recipe.train.micro_batch_size)).batches.items()
    if not batches:
        raise DataError(
            "No held-out images to prove an export on",
            got="0 images",
            need="a held-out image",
            try_="--no-proof, or a run with more images or a larger data.holdout",
            where="data.holdout",
        )
    pixels, labels = (torch.cat([batch[name] for batch in batches]).numpy() for name in ("pixel_values", "labels"))
    question = ImageQuestion(pixels)
    return question, ReferenceAnswer((domain,), np.zeros_like(labels), labels, reference(model, question))


@torch.inference_mode()
def reference(model: Model, question: Question | ImageQuestion) -> np.ndarray:
    """Compute the model's reference answers on held-out rows: FP64 log-probabilities [N, V], by FP32 and eager; of
    images [N, classes]."""
    if isinstance(question, ImageQuestion):
        each: Any = model
        logits = [each.image_logits(torch.from_numpy(pixels)) for pixels in question.batches()]
        return torch.cat(logits).double().log_softmax(-1).numpy()
    found = []
    for row, ids_S in enumerate(question.rows):
        at = question.positions_N2[question.positions_N2[:, 0] == row, 1]
        found.append(all_logits(model, ids_S)[torch.from_numpy(at)].double().log_softmax(-1).numpy())
    return np.concatenate(found)


def _pieces(batches: list[dict[str, Tensor]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Held-out pieces: (ids, labels) of each document's piece in packed rows."""
    for packed in batches:
        batch: Mapping[str, Tensor] = as_rows(packed) if is_pairs(packed) else packed
        for ids_S, labels_S, segments_S in zip(batch["input_ids"], batch["labels"], batch["segments"], strict=True):
            for segment in segments_S.unique().tolist():
                if segment >= 0:
                    at = segments_S == segment
                    yield ids_S[at].numpy(), labels_S[at].numpy()


def _texts(data: Prepared, tokenizer: Tokenizer, rows: list[np.ndarray]) -> list[str]:
    """Take held-out texts for a proof: all documents up to some megabytes, or the rows of conversations."""
    documents = data.held_out_documents() if isinstance(data, PreparedData) else rows
    texts, size = [], 0
    for ids in documents:
        texts.append(tokenizer.decode(ids.tolist()))
        size += len(texts[-1])
        if size > _MOST_TEXT:
            break
    return texts


def _long_row(ids: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Held-out ids for latencies: `CACHED_AT` + 1 of them; of a model that may have a table of positions no more than
    its rows had."""
    length = CACHED_AT + 1 if recipe.model.kind != "hf" else min(CACHED_AT + 1, recipe.data.seq_len)
    return np.resize(ids, length)

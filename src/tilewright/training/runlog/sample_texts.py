"""Texts that the model writes, for the screen and the report: beginnings of held-out documents, continued.

Of a conversation the beginning is all up to the first answer, and what was answered there is kept beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from tilewright.core.config.recipe import Recipe
from tilewright.data.batches.microbatches import Batch
from tilewright.data.common.tokenizer import Tokenizer
from tilewright.data.dataset.prepared_text import PreparedData
from tilewright.models.base.output_head import IGNORED_LABEL
from tilewright.models.base.protocols import Model
from tilewright.models.build import longest_text
from tilewright.models.generate import generate

PROMPT_TOKENS = 24
MAX_SAMPLES = 4
"""Domains that a sample is written for, the first ones of the run."""
REPLIES = 3
"""Least number of held-out conversations that are answered, where there are as many."""
_TEMPERATURE = 0.6
_TOP_K = 40


@dataclass(frozen=True)
class TextSample:
    """The beginning of a held-out text of `domain`, what the model wrote after it, and, of a conversation, the answer
    that stands there."""

    domain: str
    prompt: str
    text: str
    reference: str = ""


def run_samples(
    recipe: Recipe, model: Model, prepared: object, batches: Mapping[str, Sequence[Batch]]
) -> Iterator[TextSample]:
    """The samples of text that a recipe asks for; none of a model that writes no text."""
    if recipe.train.sample_tokens and recipe.model.task == "causal_lm" and isinstance(prepared, PreparedData):
        length, seed, stop_ids = recipe.train.sample_tokens, recipe.run.seed, prepared.stop_ids
        longest = longest_text(recipe.model, recipe.data.seq_len + length)
        how = {"num_tokens": length, "stop_ids": stop_ids, "seed": seed, "longest": longest}
        yield from write_samples(model, prepared.tokenizer, batches, **how)


def write_samples(
    model: Model,
    tokenizer: Tokenizer,
    batches: Mapping[str, Sequence[Batch]],
    *,
    num_tokens: int,
    stop_ids: Sequence[int],
    seed: int,
    longest: int | None = None,
) -> Iterator[TextSample]:
    """Write samples: one per domain, of at most `MAX_SAMPLES` domains. The same seed draws the same.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        batches: held-out batches by domain; a prompt is the beginning of a document.
        num_tokens: most tokens to draw per sample.
        stop_ids: tokens that end one.
        seed: of the draw; torch's own generators are left alone.
        longest: most tokens of prompt and sample together; None: any number. A prompt without room is left out.
    """
    device = next(iter(model.parameters())).device
    domains = [name for name, rows in batches.items() if rows][:MAX_SAMPLES]
    for domain in domains:
        for prompt, reference in _beginnings(batches[domain], tokenizer.bos_id, -(-REPLIES // len(domains))):
            room = num_tokens if longest is None else min(num_tokens, longest - len(prompt))
            if room < 1:
                continue
            ids = generate(
                model,
                prompt[None].to(device),
                room,
                temperature=_TEMPERATURE,
                top_k=_TOP_K,
                eos_id=stop_ids,
                generator=torch.Generator().manual_seed(seed),
            )
            begun, written = _continuation(tokenizer, prompt, ids[0, len(prompt) :])
            answer = _continuation(tokenizer, prompt, reference)[1] if len(reference) else ""
            yield TextSample(domain, begun, written, answer)


def _continuation(tokenizer: Tokenizer, prompt: torch.Tensor, ids: torch.Tensor) -> tuple[str, str]:
    """Decode a sample's prompt and the text that follows it, cut from the text of both. Decoded alone, the second part
    would lose its first space with some tokenizers, and a character that is cut in two."""
    alone = tokenizer.decode(prompt.tolist())
    whole = tokenizer.decode([*prompt.tolist(), *ids.tolist()])
    differs = (at for at, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b)
    cut = next(differs, min(len(alone), len(whole)))
    return whole[:cut], whole[cut:]


def _beginnings(batches: Sequence[Batch], bos_id: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take the beginnings of samples: prompt and reference of `count` conversations; one prompt of a text, without a
    reference."""
    rows = [row for batch in batches for row in zip(*_columns(batch), strict=True)]
    if found := list(islice(_conversations(rows), count)):
        return found
    ids, segments, _ = next((row for row in rows if row[0][0] == bos_id), rows[0])
    return [(ids[:PROMPT_TOKENS][segments[:PROMPT_TOKENS] == segments[0]], ids[:0])]


def _conversations(rows: Sequence[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Divide conversations for samples into the part before the first answer, and the answer. Rows that begin with
    trained text are left out."""
    for ids, segments, labels in rows:
        for segment in segments.unique():
            here = (segments == segment) & (segment >= 0)
            own, targets = ids[here], labels[here]
            trained = targets != IGNORED_LABEL
            if not bool(trained.any()) or bool(trained[0]):
                continue
            first = int(trained.int().argmax())
            after = (~trained[first:]).nonzero()
            stop = first + int(after[0]) if len(after) else len(own)
            yield own[: first + 1], targets[first:stop]


def _columns(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The columns of rows for samples: token ids, the number of each token's document (one per row if not known), and
    labels."""
    ids, labels = batch["input_ids"], batch["labels"]
    segments = batch.get("segments", torch.zeros_like(ids))
    if ids.dim() == 3:  # of a pair the chosen one
        return ids[:, 0], segments[:, 0], labels[:, 0]
    return ids, segments, labels

"""Texts that the model writes, for the screen and the report: beginnings of held-out documents, continued."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tilewright.models.base.head import IGNORED_LABEL
from tilewright.models.base.protocols import Model
from tilewright.models.generate import generate
from tilewright.training.executor.standard import Batch

PROMPT_TOKENS = 24
MAX_SAMPLES = 4
"""Domains that a sample is written for, the first ones of the run."""
_TEMPERATURE = 0.6
_TOP_K = 40


@dataclass(frozen=True)
class TextSample:
    """The beginning of a held-out text of `domain`, and what the model wrote after it."""

    domain: str
    prompt: str
    text: str


class Decodes(Protocol):
    """The part of a tokenizer needed here."""

    bos_id: int
    eos_id: int

    def decode(self, ids: Sequence[int]) -> str: ...


def write_samples(
    model: Model, tokenizer: Decodes, batches: Mapping[str, Sequence[Batch]], *, num_tokens: int, seed: int
) -> Iterator[TextSample]:
    """One sample per domain, of at most `MAX_SAMPLES` domains. The same seed draws the same.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        batches: held-out batches by domain; a prompt is the beginning of a document.
        num_tokens: most tokens to draw per sample.
        seed: of the draw; torch's own generators are left alone.
    """
    device = next(iter(model.parameters())).device
    for domain in [name for name, rows in batches.items() if rows][:MAX_SAMPLES]:
        prompt = _beginning(batches[domain], tokenizer.bos_id)
        ids = generate(
            model,
            prompt[None].to(device),
            num_tokens,
            temperature=_TEMPERATURE,
            top_k=_TOP_K,
            eos_id=tokenizer.eos_id,
            generator=torch.Generator().manual_seed(seed),
        )
        yield TextSample(domain, tokenizer.decode(prompt.tolist()), tokenizer.decode(ids[0, len(prompt) :].tolist()))


def _beginning(batches: Sequence[Batch], bos_id: int) -> torch.Tensor:
    """The first tokens of the first row that begins with a document, where there is one; of its first document."""
    rows = [row for batch in batches for row in zip(*_columns(batch), strict=True)]
    ids, segments, labels = next((row for row in rows if row[0][0] == bos_id), rows[0])
    first = int((labels != IGNORED_LABEL).int().argmax())
    length = first + 1 if first else PROMPT_TOKENS  # of a conversation the prompt is what comes before the answer
    return ids[:length][segments[:length] == segments[0]]


def _columns(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, the number of the document that each belongs to (one per row where that is not known), and labels."""
    columns = batch["input_ids"], batch.get("segments", torch.zeros_like(batch["input_ids"])), batch["labels"]
    return columns if columns[0].dim() == 2 else tuple(column[:, 0] for column in columns)  # of a pair the chosen one

"""A text that the model writes, for the report: the begin of a held-out document, continued."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from tilewright.models.base.protocols import Model
from tilewright.models.generate import generate
from tilewright.training.executor.standard import Batch

PROMPT_TOKENS = 16
_TEMPERATURE = 0.8
_TOP_K = 40


class Decodes(Protocol):
    """The part of a tokenizer needed here."""

    eos_id: int

    def decode(self, ids: Sequence[int]) -> str: ...


def write_sample(
    model: Model, tokenizer: Decodes, batches: Mapping[str, Sequence[Batch]], *, num_tokens: int, seed: int
) -> tuple[str, str]:
    """(prompt, continuation). The prompt is the first tokens of the first held-out row; the same seed draws the same.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        batches: held-out batches by domain, at least one.
        num_tokens: most tokens to draw.
        seed: of the draw; torch's own generators are left alone.
    """
    row = next(batch["input_ids"][0] for rows in batches.values() for batch in rows)
    device = next(iter(model.parameters())).device
    prompt = row[: min(PROMPT_TOKENS, len(row))]
    ids = generate(
        model,
        prompt[None].to(device),
        num_tokens,
        temperature=_TEMPERATURE,
        top_k=_TOP_K,
        eos_id=tokenizer.eos_id,
        generator=torch.Generator().manual_seed(seed),
    )
    return tokenizer.decode(prompt.tolist()), tokenizer.decode(ids[0, len(prompt) :].tolist())

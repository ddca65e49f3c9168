"""Text continuation by sampling, for the report's samples and `tilewright generate`.

No key/value cache: each token runs the whole row again, which is fine for a few hundred tokens. Works for every
causal model of `protocols.Model`.
"""

import torch
from torch import Tensor

from tilewright.models.base.eval_mode import evaluation
from tilewright.models.base.protocols import Model


@torch.no_grad()
def generate(
    model: Model,
    input_ids_BS: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Rows of token ids, continued.

    Args:
        model: a causal language model, on the device of `input_ids_BS`.
        input_ids_BS: [B, S] int64 with S >= 1, no padding.
        num_tokens: at most this many new tokens.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: draw among the k most likely tokens. 0: among all.
        eos_id: a row that has drawn it is filled up with it; all rows done ends early.
        generator: a CPU generator; the same seed gives the same tokens.

    Returns:
        [B, S + new] int64.

    Raises:
        ValueError: no prompt token, or a negative temperature, top_k or num_tokens.
    """
    if input_ids_BS.dim() != 2 or input_ids_BS.shape[1] == 0:
        raise ValueError(f"a prompt of at least one token a row is needed, got shape {tuple(input_ids_BS.shape)}")
    if temperature < 0 or top_k < 0 or num_tokens < 0:
        raise ValueError("temperature, top_k and num_tokens cannot be negative")
    # A compiled layer would be compiled again for every new length.
    with evaluation(model), torch.compiler.set_stance("force_eager"):
        return _extend(model, input_ids_BS, num_tokens, temperature, top_k, eos_id, generator)


def _extend(
    model: Model,
    ids_BS: Tensor,
    num_tokens: int,
    temperature: float,
    top_k: int,
    eos_id: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    done_B = torch.zeros(len(ids_BS), dtype=torch.bool, device=ids_BS.device)
    for _ in range(num_tokens):
        logits_BV = model.next_token_logits(ids_BS).cpu()
        next_B = _draw(logits_BV, temperature, top_k, generator).to(ids_BS.device)
        if eos_id is not None:
            next_B = torch.where(done_B, eos_id, next_B)
            done_B |= next_B == eos_id
        ids_BS = torch.cat((ids_BS, next_B[:, None]), dim=1)
        if eos_id is not None and bool(done_B.all()):
            break
    return ids_BS


def _draw(logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    if 0 < top_k < logits_BV.shape[-1]:
        kept = logits_BV.topk(top_k, dim=-1)
        drawn = torch.multinomial((kept.values / temperature).softmax(-1), 1, generator=generator)
        return kept.indices.gather(1, drawn)[:, 0]
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)[:, 0]

"""Which token comes next: the most likely one, or a draw by temperature, among the likeliest.

Legend: B rows  V vocabulary  K kept.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COLDEST = 1e-5
"""Temperature below which the most likely token is taken: FP32 logits divided by it would overflow."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: 0 takes the most likely token, and so does anything below 1e-5, by which logits overflow; otherwise
            logits are divided by it.
        top_k: draw among the k most likely tokens. 0: among all.
        top_p: of these draw among the fewest whose probabilities sum to at least this. 1: among all.
        min_p: first of all, leave out tokens whose probability is less than this share of the likeliest one's. 0: none.

    Raises:
        ValueError: a negative temperature or top_k, or a top_p or min_p outside of 0 to 1.

    Example:
        >>> Sampling(temperature=0).draw(torch.tensor([[0.1, 3.0, 0.2]]))
        tensor([1])
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or self.top_k < 0:
            raise ValueError("temperature is finite, and neither temperature nor top_k is negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is from 0 to 1, not {self.min_p}")

    def draw(self, logits_BV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample the next token: FP32 logits on the CPU -> int64 [B]."""
        if self.temperature < COLDEST:
            return logits_BV.argmax(-1)
        if self.min_p > 0:
            least_B1 = logits_BV.amax(-1, keepdim=True) + self.temperature * math.log(self.min_p)
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        if self.top_p < 1:
            return self._draw_nucleus(logits_BV, generator)
        if 0 < self.top_k < logits_BV.shape[-1]:
            kept = logits_BV.topk(self.top_k, dim=-1)
            drawn = torch.multinomial(self._probs(kept.values), 1, generator=generator)
            return kept.indices.gather(1, drawn)[:, 0]
        return torch.multinomial(self._probs(logits_BV), 1, generator=generator)[:, 0]

    def _draw_nucleus(self, logits_BV: Tensor, generator: torch.Generator | None) -> Tensor:
        """Sample from the nucleus. See: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020."""
        num_kept = min(self.top_k or logits_BV.shape[-1], logits_BV.shape[-1])
        kept = logits_BV.topk(num_kept, dim=-1)  # sorted
        probs_BK = self._probs(kept.values)
        left_out_BK = probs_BK.cumsum(-1) - probs_BK >= self.top_p
        left_out_BK[:, 0] = False  # the most likely one stays: FP32 takes a small top_p for 0
        probs_BK = probs_BK.masked_fill(left_out_BK, 0.0)
        return kept.indices.gather(1, torch.multinomial(probs_BK, 1, generator=generator))[:, 0]

    def _probs(self, logits: Tensor) -> Tensor:
        return (logits / self.temperature).softmax(-1)

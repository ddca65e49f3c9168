"""Clipping for a step that updates its parameters piece by piece, before the whole gradient is known.

Two bounds are in for the one on the global norm, neither of which needs more than what is at hand:

- The gradient is multiplied by what the norm of the step before asks for. Norms change slowly, so this is what exact
  clipping does, a step late.
- No tensor's gradient is longer than `SURGE` times the root mean square of its own past lengths (decayed by
  `MEMORY`). A sudden surge, which the first bound would let through, can so move no tensor by more than about that many
  usual updates. A tensor without a past may be as long as the bound of the whole gradient.

The lengths in that mean are those after clipping: a lasting change is followed within a few steps.
See: adaptive clipping per parameter, "AdaGC", arXiv 2502.11034, section 3.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.optim.clip import ClipResult, GradClip

SURGE = 2.0
MEMORY = 0.95


class DelayedClip:
    """Scales gradients of some tensors at a time, in place.

    Args:
        clip: bounds and threshold; its adaptive mean is kept up.
        params: all tensors, in an order that does not change between runs.
        device: where gradients are.
    """

    def __init__(self, clip: GradClip, params: Iterable[Tensor], device: torch.device | str) -> None:
        self.clip = clip
        self.factor = 1.0
        """Factor from the norm of the step before."""
        self._places = {param: place for place, param in enumerate(params)}
        self._squares = torch.zeros(len(self._places), device=device)
        self._weights = torch.zeros(len(self._places), device=device)
        self._first = clip.max_norm or math.inf

    @torch.no_grad()
    def __call__(self, params: Sequence[Tensor], grads: Sequence[Tensor], norms: Tensor) -> None:
        """Scale the gradients of `params` by the norms of earlier steps; `norms` [len(params)] are theirs, on their
        device.

        Nothing is read back to the host, and nothing changes before all memory is there.
        """
        if not grads:
            return
        places = torch.tensor([self._places[param] for param in params], device=norms.device)
        squares, weights = self._squares[places], self._weights[places]
        usual = (squares / weights.clamp_min(1e-12)).sqrt()
        limits = torch.where(weights > 0, SURGE * usual, self._first)
        lengths = norms * self.factor
        factors = self.factor * (limits / (lengths + 1e-12)).clamp_max(1.0)
        squares = MEMORY * squares + (1 - MEMORY) * torch.minimum(lengths, limits) ** 2
        weights = MEMORY * weights + (1 - MEMORY)
        kept = self._squares.index_copy(0, places, squares), self._weights.index_copy(0, places, weights)
        torch._foreach_mul_(list(grads), list(factors.unbind()))
        self._squares, self._weights = kept

    def end(self, norm: float) -> ClipResult:
        """End a step of delayed clipping: take in the norm of the whole gradient, which the next one goes by."""
        result = self.clip.decide(norm)
        if result.skip is None:
            self.factor = result.factor
        return result

    def now(self) -> tuple[float, Tensor, Tensor]:
        """State of delayed clipping now for `back_to`, not copied and not read."""
        return self.factor, self._squares, self._weights

    def back_to(self, state: tuple[float, Tensor, Tensor]) -> None:
        """Back to the state of delayed clipping when `now` was called."""
        self.factor, self._squares, self._weights = state

    def state_dict(self) -> dict[str, Any]:
        """State of delayed clipping as plain numbers; those of `clip` are saved with it."""
        return {"factor": self.factor, "squares": self._squares.tolist(), "weights": self._weights.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of delayed clipping."""
        self.factor = float(state["factor"])
        device = self._squares.device
        self._squares = torch.tensor(state["squares"], device=device)
        self._weights = torch.tensor(state["weights"], device=device)

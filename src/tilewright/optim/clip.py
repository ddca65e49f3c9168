"""Gradient clipping by global norm, with the articles' adaptive bound and a threshold above which a step is skipped."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.optim.gradients import gradient_values, total_norm


@dataclass(frozen=True)
class ClipResult:
    """`norm`: global norm before clipping (of the true, unscaled gradient). `bound`: norm clipped to, inf for none.
    `skip`: reason why the step must not be applied, or None."""

    norm: float
    bound: float
    skip: str | None

    @property
    def factor(self) -> float:
        """Factor of the gradient by which it is clipped."""
        return self.bound / (self.norm + 1e-6) if self.norm > self.bound else 1.0


class GradClip:
    """Scales gradients in place so that their global norm stays below a bound.

    The bound is `max_norm`, or `adaptive` times the running mean of past norms where that is lower
    (the articles: watch the norm in real time, and adapt). A norm above `threshold`, or one that is not
    finite, skips the step instead.

    Args:
        max_norm: largest global norm, 0 for none.
        adaptive: factor on the running mean of the norm, 0 for off.
        threshold: norm above which a step is skipped.
        momentum: of the running mean, in steps; adaptive clipping starts after as many.
        elements: bound on the magnitude of each element of the true gradient, applied before the norm that is
            clipped and told; 0 for none.
        row: ranks that hold other layers of the model, whose gradients the norm is of too; None where there are none.
        counted_elsewhere: parameters that another rank of the row or of the experts has too, whose gradients that rank
            counts.
        experts: ranks that hold other experts; so with their gradients.
    """

    def __init__(
        self,
        max_norm: float,
        adaptive: float = 0.0,
        threshold: float = 1e5,
        momentum: int = 20,
        elements: float = 0.0,
        row: dist.ProcessGroup | None = None,
        counted_elsewhere: Collection[Tensor] = (),
        experts: dist.ProcessGroup | None = None,
    ):
        self.max_norm = max_norm
        self.adaptive = adaptive
        self.threshold = threshold
        self.momentum = momentum
        self.elements = elements
        self._row, self._experts = row, experts
        self._counted_elsewhere = frozenset(counted_elsewhere)
        self.mean_norm = 0.0
        self.num_norms = 0

    @torch.no_grad()
    def __call__(self, params: Iterable[Tensor], inv_scale: float = 1.0) -> ClipResult:
        """Clip the gradients, in one pass: multiply by `inv_scale` (one over the loss scale) too.

        Raises nothing: trouble is reported in the result's `skip`, and the gradients are then left as they were.
        """
        params = list(params)
        lists = gradient_values(params)
        counted = gradient_values(param for param in params if param not in self._counted_elsewhere)
        norm = total_norm(counted, self._row, self._experts) * inv_scale
        if self.elements and math.isfinite(norm):  # an overflow must stay one
            for grads in lists:
                self.clamp(grads, inv_scale)
            norm = total_norm(counted, self._row, self._experts) * inv_scale
        result = self.decide(norm)
        factor = inv_scale * result.factor
        if factor != 1.0 and result.skip is None:
            for grads in lists:
                torch._foreach_mul_(grads, factor)
        return result

    def clamp(self, grads: list[Tensor], inv_scale: float = 1.0) -> None:
        """Clamp each element of the true gradient to `elements`, in place, before the norm is clipped; does nothing
        without a bound."""
        if self.elements and grads:
            torch._foreach_clamp_min_(grads, -self.elements / inv_scale)
            torch._foreach_clamp_max_(grads, self.elements / inv_scale)

    def decide(self, norm: float) -> ClipResult:
        """Decide how to clip a gradient of this norm, which is remembered for the adaptive bound unless it is
        skipped."""
        if not math.isfinite(norm):
            return ClipResult(norm, math.inf, "the gradient is not finite")
        if norm > self.threshold:
            return ClipResult(norm, math.inf, f"gradient norm {norm:.3g} is above clip_threshold {self.threshold:.3g}")
        bound = self._bound()
        self._remember(min(norm, bound))
        return ClipResult(norm, bound, None)

    def _bound(self) -> float:
        bound = self.max_norm or math.inf
        if self.adaptive and self.num_norms >= self.momentum:
            bound = min(bound, self.adaptive * self.mean_norm)
        return bound

    def _remember(self, norm: float) -> None:
        self.num_norms += 1
        weight = 1 / min(self.num_norms, self.momentum)
        self.mean_norm += weight * (norm - self.mean_norm)

    def state_dict(self) -> dict[str, Any]:
        """The state of clipping: the running mean, as plain numbers."""
        return {"mean_norm": self.mean_norm, "num_norms": self.num_norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of clipping."""
        self.mean_norm = float(state["mean_norm"])
        self.num_norms = int(state["num_norms"])

"""Is this step's loss or gradient out of line with the steps before it? Plain Python; asked by `controller`.

Robust on purpose: the median and the median absolute deviation (MAD) of recent steps do not move when one of them is
an outlier, as mean and standard deviation would. See: Rousseeuw and Croux 1993, on MAD and its factor 1.4826.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

_SIGMA = 1.4826
"""MAD times this is the standard deviation of a normal distribution."""
_LEAST_SPREAD = 0.01
"""Share of the median below which no spread is believed: a few equal losses are no reason to call the next a spike."""


@dataclass(frozen=True)
class Spike:
    """A value out of line: "loss", "grad_norm" or "not_finite", its value, and the value it had to stay below."""

    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        if self.name == "not_finite":
            return "the loss or its gradient is not finite"
        word = {"loss": "loss", "grad_norm": "gradient norm"}[self.name]
        return f"{word} {self.value:.4g} is above {self.threshold:.4g}, far from recent steps"


class SpikeDetector:
    """Compares a step with those before it.

    Args:
        window: recent steps that are looked at.
        warmup: steps before anything finite is called a spike.
        factor: spreads (1.4826 MAD) above the median from which a loss is a spike. In 10 000 steps of normal noise the
            largest is 4 above.
        norm_factor: the same for gradient norms, whose tail is long; too, a jump is at least `norm_jump` medians.
        norm_jump: see there.

    Example:
        >>> detector = SpikeDetector(warmup=4)
        >>> for loss in (3.0, 2.9, 3.1, 3.0): detector.add(loss, 1.0)
        >>> detector.spike(3.05, 1.0), detector.spike(9.0, 1.0).name, detector.spike(float("nan"), 1.0).name
        (None, 'loss', 'not_finite')
    """

    def __init__(
        self,
        *,
        window: int = 64,
        warmup: int = 16,
        factor: float = 8.0,
        norm_factor: float = 12.0,
        norm_jump: float = 4.0,
    ) -> None:
        self.warmup, self.factor, self.norm_factor, self.norm_jump = warmup, factor, norm_factor, norm_jump
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)

    def spike(self, loss: float, grad_norm: float) -> Spike | None:
        """The value of this step that is far above those before, a spike; None if none is. Changes nothing."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return Spike("not_finite", loss if not math.isfinite(loss) else grad_norm, math.inf)
        if len(self._losses) < self.warmup:
            return None
        highest = upper_bound(self._losses, self.factor)
        if loss > highest:
            return Spike("loss", loss, highest)
        highest = max(upper_bound(self._norms, self.norm_factor), self.norm_jump * median(self._norms))
        return Spike("grad_norm", grad_norm, highest) if grad_norm > highest else None

    def add(self, loss: float, grad_norm: float) -> None:
        """Add a step that was applied to those that spikes are measured against."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._losses.append(loss)
            self._norms.append(grad_norm)

    def forget(self) -> None:
        """Forget the steps that spikes are measured against: losses have moved to another level for good."""
        self._losses.clear()
        self._norms.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state of a detector of spikes: the steps that it remembers."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a detector of spikes from `state_dict()`."""
        self.forget()
        self._losses.extend(state["losses"])
        self._norms.extend(state["norms"])


def upper_bound(values: Sequence[float], factor: float) -> float:
    """The value above which a step is a spike: `factor` spreads (1.4826 MAD, or 1 % of the median if that is more)
    above the median."""
    middle = median(values)
    spread = _SIGMA * median(abs(value - middle) for value in values)
    return middle + factor * max(spread, _LEAST_SPREAD * abs(middle))

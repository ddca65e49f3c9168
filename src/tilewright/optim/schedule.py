"""Learning rate by step: linear warmup, then cosine, warmup-stable-decay, or constant. Pure, so it needs no state."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LRSchedule:
    """The learning rate of each step.

    Args:
        kind: cosine (Loshchilov and Hutter 2017), wsd (warmup, stable, linear decay at the end), or constant.
        lr: peak rate.
        steps: length of the run.
        warmup_steps: steps of linear rise; the first step has lr / warmup_steps.
        decay_fraction: wsd only, share of the steps in which the rate falls.
        min_lr_ratio: rate of the last step as a share of the peak.

    Example:
        >>> schedule = LRSchedule("cosine", lr=1.0, steps=100, warmup_steps=10, min_lr_ratio=0.1)
        >>> [round(schedule.lr_at(step), 3) for step in (0, 9, 10, 99)]
        [0.1, 1.0, 1.0, 0.1]
    """

    kind: Literal["cosine", "wsd", "constant"]
    lr: float
    steps: int
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    min_lr_ratio: float = 0.1

    def lr_at(self, step: int) -> float:
        """The schedule's learning rate of step `step`, counted from 0. Past the end it stays at the last rate."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        start = self.warmup_steps if self.kind == "cosine" else round(self.steps * (1 - self.decay_fraction))
        start = max(start, self.warmup_steps)
        done = min(max(step - start, 0) / max(self.steps - 1 - start, 1), 1.0)
        fall = (1 - math.cos(math.pi * done)) / 2 if self.kind == "cosine" else done
        return self.lr * (1 - (1 - self.min_lr_ratio) * fall)

"""The cost model and the speeds of ranks, fitted to measured seconds of stages during a run.

Least squares of relative errors over the last steps (older ones fade by `FADE` per step), without negative coefficients
(Bro and de Jong 1997), with weights that let outliers count for little (Huber 1964), pulled a little to where it began:
balanced micro-batches are nearly equal, and what of them costs the time is then not to be seen. One process fits, and
tells the others: another machine's linear algebra may differ in the last bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.parallel.pipeline.balance.cost_model import CostModel, StageWork

FADE = 0.9
HUBER = 1.345
_PULL, _PULL_OF_ENDS = 1e-3, 1.0
"""To the prior, in units of what was measured. That of the ends is strong: a rank with an end that takes long is taken
for a slow one, as where its layers should go is asked, and nothing measured tells the two apart."""
_SPEED_STEP = 0.5


@dataclass(frozen=True)
class StageSeconds:
    """Measured seconds of one micro-batch in one stage."""

    work: StageWork
    rank: int
    """That has the stage, among all."""
    seconds: float
    """Of its passes."""


@dataclass
class CostFit:
    """Fit of the cost model, which follows what stages are measured to take.

    Args:
        prior: until something was measured, in any unit.
        ranks: whose speeds are fitted.
    """

    prior: CostModel
    ranks: int
    steps: int = 0
    """That were learned from."""
    error: float = float("nan")
    """Mean relative error of what the model said of the last step before it learned from it."""
    speeds: list[float] = field(default_factory=list)
    """Of the ranks; their geometric mean is 1."""

    def __post_init__(self) -> None:
        size = len(self.prior.coefficients)
        self.model, self.speeds = self.prior, self.speeds or [1.0] * self.ranks
        self._products, self._sums = np.zeros((size, size)), np.zeros(size)

    def learn(self, measured: Sequence[StageSeconds]) -> None:
        """Fit the cost model to what a step took; a step of no seconds is left out."""
        measured = [one for one in measured if one.seconds > 0]
        if not measured:
            return
        x = np.array([one.work.features(self.prior.kinds) for one in measured])
        seconds = np.array([one.seconds for one in measured])
        rank = np.array([one.rank for one in measured])
        speed = np.array(self.speeds)[rank]
        if self.steps:
            said = x @ np.array(self.model.coefficients) / speed
            self.error = float(np.mean(np.abs(said - seconds) / seconds))
        y = seconds * speed
        self._products *= FADE
        self._sums *= FADE
        weights = np.ones(len(y))
        for _ in range(4):
            products, sums = self._with(x, y, weights)
            found = self._solved(products, sums)
            error = np.abs(x @ found - y) / y
            usual = 1.4826 * float(np.median(error))
            weights = np.minimum(1.0, HUBER * usual / np.maximum(error, 1e-12)) if usual > 0 else np.ones(len(y))
        self._products, self._sums = products, sums
        self.model = CostModel(self.prior.kinds, tuple(float(c) for c in found))
        self._follow_speeds(x @ found / seconds, rank)
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The state of the cost model's fit in JSON types."""
        return {
            "steps": self.steps, "speeds": list(self.speeds), "model": self.model.to_json(),
            "products": self._products.tolist(), "sums": self._sums.tolist(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the fit from `state_dict()`; a state of other layers or ranks is not taken."""
        model = CostModel.from_json(state["model"])
        if model.kinds != self.prior.kinds:
            return
        self.model, self.steps = model, state["steps"]
        self._products, self._sums = np.array(state["products"]), np.array(state["sums"])
        if len(state["speeds"]) == self.ranks:
            self.speeds = list(state["speeds"])

    def _with(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        relative = weights / np.square(y) / len(y)
        return self._products + (x.T * relative) @ x, self._sums + x.T @ (relative * y)

    def _solved(self, products: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Solve the fit for its coefficients, which the prior attracts, in the unit of what was measured."""
        begin = np.array(self.prior.coefficients)
        size = float(begin @ products @ begin)
        begin = begin * (float(begin @ sums) / size if size > 0 else 0.0)
        scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
        scaled = products / np.outer(scale, scale)
        seen = np.diag(products) > 0
        pull = np.full(len(sums), _PULL)
        pull[-3:-1] = _PULL_OF_ENDS
        pull[~seen] = 1.0  # what no stage has stays as it was
        return _not_negative(scaled + np.diag(pull), sums / scale + pull * begin * scale) / scale

    def _follow_speeds(self, ratios: np.ndarray, rank: np.ndarray) -> None:
        step = _SPEED_STEP if self.steps else 0.0  # the first one compiles
        speeds = [
            (1 - step) * old + step * float(np.median(ratios[rank == number])) if (rank == number).any() else old
            for number, old in enumerate(self.speeds)
        ]
        mean = float(np.exp(np.mean(np.log(speeds))))
        self.speeds = [speed / mean for speed in speeds]


def _not_negative(products: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Find the x >= 0 of least x' A x / 2 - b' x, by fast non-negative least squares."""
    x, free = np.zeros(len(sums)), np.zeros(len(sums), dtype=bool)
    for _ in range(3 * len(sums)):
        slope = sums - products @ x
        best = int(np.argmax(np.where(free, -np.inf, slope)))
        if free.all() or slope[best] <= 1e-12 * float(np.abs(sums).max(initial=0.0)):
            break
        free[best] = True
        while True:
            found = np.zeros_like(x)
            found[free] = np.linalg.solve(products[np.ix_(free, free)], sums[free])
            bad = free & (found <= 0)
            if not bad.any():
                x = found
                break
            step = float(np.min(x[bad] / np.maximum(x[bad] - found[bad], 1e-300)))
            x = x + step * (found - x)
            free &= x > 1e-15
    return x

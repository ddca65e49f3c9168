"""The metrics of a run as columns of doubles, and as few points as a chart can show.

A number that was recorded and is not finite is NaN here, and a gap in the chart. A step that a resumed run writes again
replaces the earlier one. Rules are those of `run_data.clean_rows` and `run_data.collect_run`, which read the whole
files.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from tilewright.report.run_data.clean_rows import Row, eval_row, number
from tilewright.report.run_data.collect_run import MOST_STEPS
from tilewright.report.run_data.run_numbers import held_out

NAN = float("nan")
MAX_NAMES = 200
"""Most metrics of a run; more come from a file that is no metrics file."""
X_NAMES = {"step": "step", "time": "time_s", "tokens": "tokens"}
"""Choices of the x axis -> the column that holds each."""
_NO_CURVE = frozenset({"step", "time_s", "tokens", "skipped", "redone"})


class Columns:
    """Columns of metrics over rising steps. Doubles in arrays: 16 bytes per value."""

    def __init__(self) -> None:
        self.steps: dict[str, array[float]] = {}
        self.values: dict[str, array[float]] = {}
        self._last = -inf

    @property
    def last_step(self) -> int | None:
        """The highest step that was added to watched curves, None without one."""
        return int(self._last) if isfinite(self._last) else None

    def add(self, step: float, row: Mapping[str, float]) -> None:
        """Add a row of metrics to watched curves; one of a step that is there replaces it."""
        step = float(step)
        at_end = step > self._last
        if at_end:
            self._last = step
        else:
            self._remove(step)
        for name, value in row.items():
            if name not in self.values:
                if len(self.values) == MAX_NAMES:
                    continue
                self.steps[name], self.values[name] = array("d"), array("d")
            steps = self.steps[name]
            place = len(steps) if at_end else bisect_left(steps, step)
            steps.insert(place, step)
            self.values[name].insert(place, value)

    def _remove(self, step: float) -> None:
        for name, steps in self.steps.items():
            place = bisect_left(steps, step)
            if place < len(steps) and steps[place] == step:
                del steps[place]
                del self.values[name][place]

    def curve(self, name: str, low: float = -inf, high: float = inf) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a watched metric from step `low` to `high` with one neighbour at each side, as copies,
        both (N,) float64; empty if it was never recorded."""
        part = self.part(name, low, high)
        empty = array("d")
        return np.array(self.steps.get(name, empty)[part]), np.array(self.values.get(name, empty)[part])

    def part(self, name: str, low: float, high: float) -> slice:
        """The part of a watched curve between two steps, as indices of its values."""
        steps = self.steps.get(name, array("d"))
        return slice(max(bisect_left(steps, low) - 1, 0), min(bisect_right(steps, high) + 1, len(steps)))

    def last(self, name: str) -> float:
        """The newest finite value of a watched curve's metric, NaN without one."""
        return next((value for value in reversed(self.values.get(name, array("d"))) if isfinite(value)), NAN)


class Metrics:
    """The columns of metrics.jsonl: one set of the training rows, one of the evaluations."""

    def __init__(self) -> None:
        self.training = Columns()
        self.evaluation = Columns()

    def add(self, row: Row) -> None:
        """Add a row of metrics.jsonl to watched curves; one without a step is left out."""
        step = row.get("step")
        if not isinstance(step, int) or abs(step) >= MOST_STEPS:
            return
        if "eval" not in row:
            self.training.add(step, _scalars(row))
        elif isinstance(row["eval"], dict):
            self.evaluation.add(step, _held_out(eval_row(row)))

    def names(self) -> list[str]:
        """Names of the metrics that are drawn, in the order in which they were first recorded."""
        return [name for name in (*self.training.values, *self.evaluation.values) if name not in _NO_CURVE]

    def steps_between(self, x: str, low: float | None, high: float | None) -> tuple[float, float]:
        """The steps of watched curves at which x is from `low` to `high`.

        Args:
            x: of `X_NAMES`.
            low: None: from the first one on.
            high: None: to the last one.
        """
        bounds = (-inf if low is None else low, inf if high is None else high)
        if x == "step" or bounds == (-inf, inf):
            return bounds
        steps, values = self._axis(x)
        if not len(steps):
            return bounds
        first, last = np.searchsorted(values, bounds[0]), np.searchsorted(values, bounds[1], side="right") - 1
        return float(steps[min(first, len(steps) - 1)]), float(steps[max(last, 0)])

    def count(self, name: str, low: float, high: float) -> int:
        """Number of a watched curve's values from step `low` to `high`, with one neighbour at each side."""
        part = self._columns(name).part(name, low, high)
        return max(part.stop - part.start, 0)

    def last(self, name: str) -> float:
        """The newest finite value of a watched curve, NaN without one."""
        return self._columns(name).last(name)

    def curve(self, name: str, x: str, low: float = -inf, high: float = inf) -> tuple[np.ndarray, np.ndarray]:
        """The x and the values of a watched metric from step `low` to `high` with one neighbour at each side, both (N,)
        float64.

        Args:
            name: of `names`.
            x: of `X_NAMES`. Time and tokens of a step that has none are interpolated; without any the curve is empty.
            low: step.
            high: step.
        """
        steps, values = self._columns(name).curve(name, low, high)
        if x == "step" or not len(steps):
            return steps, values
        at, known = self._axis(x)
        return (np.interp(steps, at, known), values) if len(at) else (steps[:0], values[:0])

    def _columns(self, name: str) -> Columns:
        return self.evaluation if name in self.evaluation.values else self.training

    def _axis(self, x: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps and the x values of watched curves, made never to fall: a clock that was set back stands still."""
        steps, values = self.training.curve(X_NAMES[x])
        good = np.isfinite(values)
        return steps[good], np.maximum.accumulate(values[good])


def _scalars(row: Row) -> dict[str, float]:
    """The numbers of a training row that are drawn, NaN for one that is not finite; text and tables are left out."""
    found = {}
    for name, value in row.items():
        usable = number(value)
        if usable is not None:
            found[name] = usable
        elif name != "skipped" and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
            found[name] = NAN
    return found


def _held_out(row: Row) -> dict[str, float]:
    pooled = held_out(row)
    found = {"held_out": NAN if pooled is None else pooled, "time_s": NAN if row["time_s"] is None else row["time_s"]}
    for domain, result in row["eval"].items():
        found[f"held_out/{domain}"] = NAN if result["loss"] is None else result["loss"]
    return found


@dataclass(frozen=True)
class DrawnCurve:
    """A curve in few points: the mean, the lowest and the highest value of each stretch; NaN where none is finite.

    `not_finite` counts the values that are not in it.
    """

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    not_finite: int

    def to_json(self, last: float) -> dict[str, Any]:
        """A drawn curve as plain types, NaN as it is; `low` and `high` only where they differ from the mean. `last`:
        newest value."""
        found: dict[str, Any] = {"x": self.x, "y": self.mean, "last": last, "not_finite": self.not_finite}
        return found if self.low is self.high else found | {"low": self.low, "high": self.high}


def stretch_for(count: int, points: int) -> int:
    """Choose the values per point, a power of two, so that `count` values become at most `points`.

    Example:
        >>> [stretch_for(count, 400) for count in (0, 400, 401, 10_000)]
        [1, 1, 2, 32]
    """
    return 1 << (max(1, -(-count // points)) - 1).bit_length()


def downsample(x_N: np.ndarray, y_N: np.ndarray, stretch: int) -> DrawnCurve:
    """Downsample a curve: one point for `stretch` values in a row; the first and the last x stay.

    Args:
        x_N: (N,) float64, rising.
        y_N: (N,) float64, magnitudes up to 1e300; NaN where a value is missing.
        stretch: values per point, at least 1.
    """
    good = np.isfinite(y_N)
    missing = int((~good).sum())
    if stretch == 1 or not len(x_N):
        values = y_N.tolist()
        return DrawnCurve(x_N.tolist(), values, values, values, missing)
    starts = np.arange(0, len(x_N), stretch)
    count = np.add.reduceat(good.astype(np.int64), starts)
    # Divided before the sum: the sum of large values may be more than a double holds.
    share = np.repeat(1 / np.maximum(count, 1), stretch)[: len(y_N)]
    mean = np.add.reduceat(np.where(good, y_N, 0.0) * share, starts)
    low = np.minimum.reduceat(np.where(good, y_N, inf), starts)
    high = np.maximum.reduceat(np.where(good, y_N, -inf), starts)
    mean, low, high = (np.where(count > 0, values, NAN) for values in (np.clip(mean, low, high), low, high))
    at = x_N[np.minimum(starts + (stretch - 1) // 2, len(x_N) - 1)]
    at[0], at[-1] = x_N[0], x_N[-1]
    return DrawnCurve(at.tolist(), mean.tolist(), low.tolist(), high.tolist(), missing)

"""Levels of a noisy curve, and how sure they are. Medians throughout: single outliers move none of them.

See: Rousseeuw and Croux 1993, on the median absolute deviation and its factor 1.4826.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tilewright.precision.controller.spikes import upper_bound

_SIGMA = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""
_MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: the root of pi / 2."""
RECENT = 64
"""Records that an outlier is compared with."""
FEWEST_RECENT = 16
"""Records before anything is called an outlier, as in `precision.controller.spikes`."""


@dataclass(frozen=True)
class Level:
    """The level of a noisy curve: the median of a stretch, and where in the curve it ends."""

    value: float
    count: int
    end: int

    def error(self, sigma: float) -> float:
        """Standard error of a level's `value` where single values scatter by `sigma`."""
        return _MEDIAN_ERROR * sigma / math.sqrt(self.count)


def noise(values: Sequence[float]) -> float:
    """Estimate the standard deviation of a curve's values about their trend from the differences of neighbours; 0 for
    fewer than 3.

    Example:
        >>> noise([5.0, 4.0, 3.0, 2.0]), noise([1.0]) # a straight line has differences, and no scatter
        (0.0, 0.0)
    """
    steps = [after - before for before, after in pairwise(values)]
    if len(steps) < 2:
        return 0.0
    middle = median(steps)
    return _SIGMA * median(abs(step - middle) for step in steps) / math.sqrt(2)


def levels(values: Sequence[float], width: int) -> list[Level]:
    """Levels of consecutive stretches of `width` values, in order; the last one ends with the last value.

    Values at the front that do not fill a stretch are left out.
    """
    starts = range(len(values) % width, len(values), width)
    return [Level(median(values[start : start + width]), width, start + width) for start in starts]


def level(values: Sequence[float], end: int) -> Level:
    """The level of one stretch of a curve."""
    return Level(median(values), len(values), end)


def difference_error(first: Level, second: Level, sigma: float) -> float:
    """Standard error of the difference of two levels of a curve."""
    return math.hypot(first.error(sigma), second.error(sigma))


def outliers(values: Sequence[float], factor: float, jump: float = 0.0) -> Iterable[bool]:
    """Find outliers of a curve: true for each value, but the first `FEWEST_RECENT`, that is far above the `RECENT`
    before it.

    Args:
        values: in order.
        factor: spreads above the median of the recent values from which a value is far above.
        jump: times that median that it is too; 0 for values that may be negative.
    """
    for i in range(FEWEST_RECENT, len(values)):
        recent = values[max(0, i - RECENT) : i]
        limit = upper_bound(recent, factor)
        yield values[i] > (max(limit, jump * median(recent)) if jump else limit)

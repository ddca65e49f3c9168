"""The few statistics of the report: smoothing, and how well gradient norms follow a log-normal law.

Plain Python on lists of numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pstdev


def smooth(xs: Sequence[float], ys: Sequence[float], width: int, at_most: int = 400) -> tuple[list[float], list[float]]:
    """Smooth a curve by local straight lines: each point is the value of a line through its `width` neighbours.

    Neighbours weigh less the farther they are (triangle). Unlike a running mean it does not lag on a slope or
    bend at the ends. The result has at most `at_most` points, the last one among them.

    Example:
        >>> smooth([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0], 3)
        ([0, 1, 2, 3], [1.0, 3.0, 5.0, 7.0])
    """
    count = len(xs)
    half = max(1, width // 2)
    centres = sorted({*range(0, count, -(-count // at_most)), count - 1}) if count else []
    return [xs[i] for i in centres], [_line_value(xs, ys, i, half) for i in centres]


def _line_value(xs: Sequence[float], ys: Sequence[float], centre: int, half: int) -> float:
    near = range(max(0, centre - half), min(len(xs), centre + half + 1))
    stride = -(-len(near) // 200)
    rows = [(1 - abs(i - centre) / (half + 1), xs[i] - xs[centre], ys[i]) for i in (*near[::stride], centre)]
    weight = sum(w for w, _, _ in rows)
    mean_x = sum(w * x for w, x, _ in rows) / weight
    mean_y = sum(w * y for w, _, y in rows) / weight
    spread = sum(w * (x - mean_x) ** 2 for w, x, _ in rows)
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in rows) / spread if spread > 0 else 0.0
    return mean_y - slope * mean_x


@dataclass(frozen=True)
class LogNormalFit:
    """Log-normal fit of gradient norms: mean `mu` and deviation `sigma` of ln(x), by moments, from `count` values.

    `distance`: Kolmogorov-Smirnov distance between the values and the fit. `bound`: Lilliefors' 5 % bound of
    that distance, 0.886 / sqrt(count), for independent values; norms of neighbouring steps are not quite that.
    `skew`: skewness of ln(x), 0 for a log-normal law.
    """

    mu: float
    sigma: float
    count: int
    distance: float
    bound: float
    skew: float

    def density(self, log_x: float) -> float:
        """The density of ln(x) under the log-normal fit."""
        return NormalDist(self.mu, self.sigma).pdf(log_x)

    @property
    def median(self) -> float:
        """The median of the log-normal fit, exp(mu), in the unit of x."""
        return math.exp(self.mu)

    @property
    def follows(self) -> bool:
        """True if the distance of the values from the log-normal fit stays within the bound."""
        return self.distance <= self.bound


def fit_log_normal(values: Sequence[float]) -> LogNormalFit | None:
    """Fit a log-normal law to the positive finite values; None for fewer than 8 of them, or if all are alike.

    Example:
        >>> fit = fit_log_normal([math.exp(z) for z in (-1.3, -.8, -.5, -.2, 0, .2, .5, .8, 1.3)])
        >>> round(fit.mu, 3), fit.follows
        (0.0, True)
    """
    logs = sorted(math.log(v) for v in values if v > 0 and math.isfinite(v))
    if len(logs) < 8 or logs[-1] - logs[0] < 1e-9:
        return None
    mu, sigma = fmean(logs), pstdev(logs)
    law = NormalDist(mu, sigma)
    count = len(logs)
    distance = max(max((i + 1) / count - law.cdf(z), law.cdf(z) - i / count) for i, z in enumerate(logs))
    skew = fmean(((z - mu) / sigma) ** 3 for z in logs)
    return LogNormalFit(mu, sigma, count, distance, 0.886 / math.sqrt(count), skew)

"""Predicted loss of a policy: single switches, made into numbers that may be added up.

Two parts. The forward matmul changes the loss at once; that was measured, batch by batch. All three matmuls blur
the gradient; the share of AdamW's step that is lost (`gradient_error`) is worth as much as that share of the run's
remaining steps, so it is multiplied by how much the loss falls while the number of steps grows by a factor e.

A measured change is noisy, and a solver that may choose among noisy numbers chooses the lucky ones. So changes are
drawn towards their mean by as much as their noise accounts for (Efron and Morris 1975), and a switch that seems to
lower the loss counts as zero.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tilewright.core.errors import ConfigError
from tilewright.precision.search.sensitivity import PolicyChange, Sensitivity

Product = tuple[str, str]
"""A unit's name and one of its matmuls."""


@dataclass(frozen=True)
class Prediction:
    """A relative change of the loss, 0.001 for 0.1 % more, and its standard error over the batches."""

    change: float
    se: float

    def __str__(self) -> str:
        return f"{percent(self.change)} ± {percent(self.se)}"


class LossModel:
    """Predicted loss changes.

    Args:
        sensitivity: what was measured.
        slope: relative fall of the loss while the number of steps grows by a factor e, see `loss_slope`.
    """

    def __init__(self, sensitivity: Sensitivity, slope: float) -> None:
        self.slope = slope
        finite = [switch for switch in sensitivity.switches if switch.finite]
        self._per_batch: dict[Product, tuple[float, ...]] = {
            (s.unit, s.gemm): tuple(change + slope * lost for change, lost in zip(s.loss_change, s.lost, strict=True))
            for s in finite
        }
        drawn = shrink_to_mean({(s.unit, s.gemm): s.loss_change for s in finite if s.gemm == "fprop"})
        self.costs: dict[Product, float] = {(s.unit, s.gemm): math.inf for s in sensitivity.switches}
        """Predicted change of each switch, never below zero; infinite where it gave infinities or NaN."""
        for s in finite:
            blur = slope * statistics.fmean(s.lost)
            self.costs[s.unit, s.gemm] = max(drawn.get((s.unit, s.gemm), 0.0) + blur, 0.0)
        self._num_batches = len(sensitivity.losses)

    def predict(self, fp8: Collection[Product]) -> Prediction:
        """Predict the change of the loss under a policy with these matmuls in FP8, all others in BF16, which counts as
        no change."""
        change = sum(self.costs[matmul] for matmul in fp8)
        if not math.isfinite(change):
            return Prediction(math.inf, math.inf)
        sums = [sum(self._per_batch[matmul][batch] for matmul in fp8) for batch in range(self._num_batches)]
        return Prediction(change, standard_error(sums))

    def of(self, measured: PolicyChange) -> Prediction:
        """The loss model's change of a policy that was measured as a whole, by the same sum."""
        sums = [change + self.slope * lost for change, lost in zip(measured.loss_change, measured.lost, strict=True)]
        return Prediction(statistics.fmean(sums), standard_error(sums))


def shrink_to_mean(values: Mapping[Product, Sequence[float]]) -> dict[Product, float]:
    """Shrink the means of the loss model's noisy values towards their common mean, by the share of their variance that
    is noise.

    Example: the two differ by far less than each wavers, so they are hardly told apart.
        >>> drawn = shrink_to_mean({("a", "fprop"): (-2.0, 4.0), ("b", "fprop"): (-1.0, 5.0)})
        >>> drawn["a", "fprop"], drawn["b", "fprop"]
        (1.5, 1.5)
    """
    if not values:
        return {}
    means = {key: statistics.fmean(found) for key, found in values.items()}
    noise = statistics.fmean(standard_error(found) ** 2 for found in values.values())
    spread = statistics.variance(means.values()) if len(means) > 1 else 0.0
    keep = max(0.0, 1 - noise / spread) if spread > 0 else 0.0
    middle = statistics.fmean(means.values())
    return {key: middle + keep * (mean - middle) for key, mean in means.items()}


def standard_error(values: Sequence[float]) -> float:
    """Standard error for the loss model, of the mean of independent values; infinite for a single one.

    Example:
        >>> standard_error((1.0, 3.0))
        1.0
    """
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def loss_slope(steps: Sequence[float], losses: Sequence[float]) -> float:
    """The slope of the loss: its relative fall while the number of steps grows by a factor e.

    Least squares of the loss over the logarithm of the step, on all steps: losses of small batches waver too much for
    the last ones alone to show it. As the first steps fall fastest, this errs on the safe side. Zero where the loss
    rises, or fewer than four losses are known.

    Example:
        >>> import math
        >>> round(loss_slope(range(1, 101), [4 - 0.2 * math.log(step) for step in range(1, 101)]), 3)
        0.065
    """
    pairs = [(math.log(s), v) for s, v in zip(steps, losses, strict=True) if s > 0 and math.isfinite(v)]
    if len(pairs) < 4 or pairs[-1][1] <= 0:
        return 0.0
    slope = statistics.linear_regression([x for x, _ in pairs], [y for _, y in pairs]).slope
    return max(0.0, -slope / pairs[-1][1])


def parse_budget(text: str) -> float:
    """Read the budget of a policy search: a relative loss change from "0.25%".

    Raises:
        ConfigError: it is no number with a percent sign.

    Example:
        >>> parse_budget("0.25%"), parse_budget("1 %")
        (0.0025, 0.01)
    """
    number = text.strip().removesuffix("%").strip()
    try:
        value = float(number) if text.strip().endswith("%") else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            "Loss budget is not a percentage",
            got=repr(text),
            need="a number with a percent sign",
            try_='--budget "0.25%"',
            where="--budget",
        )
    return value / 100


def percent(share: float) -> str:
    """A small share of the loss as percent, with two figures that matter and never an exponent.

    Example:
        >>> percent(0.0025), percent(-0.0000123), percent(1e-12), percent(0.3)
        ('0.25 %', '-0.0012 %', '0 %', '30 %')
    """
    value = 100 * share
    if not math.isfinite(value) or abs(value) < 5e-7:
        return f"{value:g} %" if not math.isfinite(value) else "0 %"
    figures = max(0, 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{figures}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"

"""Does a measurement meet its target? Rules with numbers; `claims` applies them, and `pages` prints them.

pass       the target holds, and so does the 95 % interval of what was measured
miss       the interval is on the wrong side of the target
undecided  the target is inside the interval, or smaller than the noise between seeds
not run    nothing has been measured
-          there is no target: the number is there for comparison

Samples that were taken in turns give the interval of their median, by order statistics (below six samples: their whole
range). Seeds give the interval of their mean, by Student's t. A single number has no interval; it is compared as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import mean, median, stdev

from scipy.stats import t as student

CONFIDENCE = 0.95
PASS, MISS, UNDECIDED, NOT_RUN, NO_TARGET = "pass", "miss", "undecided", "not run", "-"
Text = Callable[[float], str]


@dataclass(frozen=True)
class Verdict:
    """What a row of the page says of a measurement."""

    text: str
    """The measurement: its median, its range, and of how many samples."""
    status: str
    why: str = ""
    """What makes it undecided."""


def interval_of_median(samples: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of samples, as far from both ends, that holds the median with 95 % probability.

    Below six samples no pair does, and the whole range is taken.
    """
    ordered, count = sorted(samples), len(samples)
    outside, below = 0, 0.0
    while outside < count // 2:
        below += comb(count, outside) / 2**count
        if 1 - 2 * below < CONFIDENCE:
            break
        outside += 1
    first = max(outside - 1, 0)
    return ordered[first], ordered[count - 1 - first]


def interval_of_mean(samples: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of normal samples, of which there are two or more."""
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(samples) - 1)) * stdev(samples) / len(samples) ** 0.5
    return mean(samples) - half, mean(samples) + half


def status_at_most(low: float, high: float, bound: float) -> str:
    """A number that is somewhere between `low` and `high` against its upper bound."""
    return PASS if high <= bound else MISS if low > bound else UNDECIDED


def turns(
    samples: Sequence[float], text: Text, *, at_most: float | None = None, at_least: float | None = None
) -> Verdict:
    """Samples of one machine, taken in turns, against an upper or a lower bound; without one there is no target."""
    low, high = interval_of_median(samples)
    ranged = f"{text(median(samples))} ({text(min(samples))} to {text(max(samples))}, n = {len(samples)})"
    if at_most is not None:
        status = status_at_most(low, high, at_most)
    elif at_least is not None:
        status = status_at_most(-high, -low, -at_least)
    else:
        return Verdict(ranged, NO_TARGET)
    return Verdict(ranged, status, f"95 % interval {text(low)} to {text(high)}" if status == UNDECIDED else "")


def seeds(gaps: Sequence[float], noise: float | None, *, at_most: float | None = None) -> Verdict:
    """Changes of a loss in percent, one per seed, against an upper bound.

    Args:
        noise: standard deviation of the baseline's loss over its seeds, in percent; None where there is one seed.
    """
    count = f"{len(gaps)} seed{'s' if len(gaps) > 1 else ''}"
    ranged = f" ({min(gaps):+.2f} to {max(gaps):+.2f}, {count})" if len(gaps) > 1 else f" ({count})"
    said = f"{median(gaps):+.2f} %{ranged}"
    if at_most is None:
        return Verdict(said, NO_TARGET)
    if noise is not None and abs(at_most) < noise:
        if len(gaps) < 2 or status_at_most(*interval_of_mean(gaps), at_most) != MISS:
            return Verdict(said, UNDECIDED, f"seeds alone differ by {noise:.2f} %")
        return Verdict(said, MISS)
    if len(gaps) < 2:
        return Verdict(said, UNDECIDED, "one seed")
    low, high = interval_of_mean(gaps)
    status = status_at_most(low, high, at_most)
    return Verdict(said, status, f"95 % interval {low:+.2f} to {high:+.2f} %" if status == UNDECIDED else "")


def errors(fractions: Sequence[float], most: float) -> Verdict:
    """Relative errors of a prediction, one per run; all of them within the bound, which is in percent."""
    percent = [100 * error for error in fractions]
    said = f"{median(percent):+.1f} % ({min(percent):+.1f} to {max(percent):+.1f}, {len(percent)} runs)"
    return Verdict(said, PASS if max(map(abs, percent)) <= most else MISS)


def once(value: float, text: str, *, at_most: float | None = None, at_least: float | None = None) -> Verdict:
    """One number without spread."""
    if at_most is not None:
        return Verdict(text, PASS if value <= at_most else MISS)
    if at_least is not None:
        return Verdict(text, PASS if value >= at_least else MISS)
    return Verdict(text, NO_TARGET)

"""The picture of a search for a policy: how fast the matmuls are over what they cost in loss."""

from collections.abc import Sequence

from tilewright.precision.search.gemm_time import TIMES
from tilewright.precision.search.policy_search import PolicyCandidate
from tilewright.report.svg.charts import Series, line_chart, standalone
from tilewright.training.precision_search import SearchResult

_SIZE = (760, 420)


def tradeoff_svg(found: SearchResult, title: str) -> str:
    """Draw the trade-off of a policy search: fastest policies over budgets, the chosen one and the usual choices
    marked.

    Args:
        found: what a search found.
        title: of the picture.
    """
    base = next(mark for mark in found.baselines if mark.name == "all BF16")
    points = sorted(found.curve, key=lambda point: (point.predicted.change, point.seconds))
    series = [_series("fastest policy", points, base, 0, "step")]
    named = [found.chosen, *found.baselines]
    series += [_series(point.name, [point], base, colour, "dots") for colour, point in enumerate(named, start=1)]
    chart = line_chart(
        [one for one in series if one.xs],
        label=title,
        y_label="linear matmuls, times as fast as all BF16",
        x_label="predicted loss change, percent",
        size=_SIZE,
    )
    legend = [f"fastest policy within a budget; speed: {TIMES[found.time]}"]
    legend += [f"{point.name}: {point.predicted}, {base.seconds / point.seconds:.3g}x" for point in named]
    return standalone(chart, title, legend, _SIZE)


def _series(name: str, points: Sequence[PolicyCandidate], base: PolicyCandidate, colour: int, kind: str) -> Series:
    xs = [100 * point.predicted.change for point in points]
    return Series(name, xs, [base.seconds / point.seconds for point in points], colour, kind)

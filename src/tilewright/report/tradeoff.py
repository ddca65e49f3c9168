"""The trade-off curve of a precision search as one SVG file: loss given up against speed gained.

The style sheet of the report is put inside, so that the file opens by itself, in light and dark. Called by
`cli.precision`.
"""

from collections.abc import Sequence
from html import escape
from importlib import resources

from tilewright.precision.gemm_time import TIMES
from tilewright.precision.search import Candidate
from tilewright.report.charts import Series, line_chart
from tilewright.training.search_precision import Found
from tilewright.training.search_recorded import Recorded

_SIZE = (760, 420)
_LEGEND_LINE = 18


def tradeoff_svg(found: Found | Recorded, title: str) -> str:
    """The curve of fastest policies over budgets, with the chosen policy and the usual choices marked.

    Args:
        found: what a search found.
        title: of the picture.
    """
    base = next(mark for mark in found.landmarks if mark.name == "all BF16")
    points = sorted(found.curve, key=lambda point: (point.predicted.change, point.seconds))
    series = [_series("fastest policy", points, base, 0, "step")]
    named = [found.chosen, *found.landmarks]
    series += [_series(point.name, [point], base, colour, "dots") for colour, point in enumerate(named, start=1)]
    chart = line_chart(
        [one for one in series if one.xs],
        label=title,
        y_label="linear products, times as fast as all BF16",
        x_label="predicted loss change, per cent",
        size=_SIZE,
    )
    legend = [f"fastest policy within a budget; speed: {TIMES[found.time]}"]
    legend += [f"{point.name}: {point.predicted}, {base.seconds / point.seconds:.3g}x" for point in named]
    return _standalone(chart, title, legend)


def _series(name: str, points: Sequence[Candidate], base: Candidate, colour: int, kind: str) -> Series:
    xs = [100 * point.predicted.change for point in points]
    return Series(name, xs, [base.seconds / point.seconds for point in points], colour, kind)


def _standalone(chart: str, title: str, legend: Sequence[str]) -> str:
    """A chart with its style, title and legend as a file of its own."""
    width, height = _SIZE
    css = resources.files("tilewright.report").joinpath("page.css").read_text(encoding="utf-8")
    top = 34 + _LEGEND_LINE * len(legend)
    rows = "".join(
        f'<circle class="dot c{i % 8}" cx="24" cy="{40 + _LEGEND_LINE * i}" r="4"/>'
        f'<text class="value" x="36" y="{44 + _LEGEND_LINE * i}">{escape(text)}</text>'
        for i, text in enumerate(legend)
    )
    inner = chart.replace("<svg ", f'<svg x="16" y="{top}" width="{width}" height="{height}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 32} {height + top + 12}" '
        f'font-family="system-ui, sans-serif"><style>{css}</style>'
        f'<rect width="100%" height="100%" style="fill: var(--paper)"/>'
        f'<text x="20" y="20" style="fill: var(--ink); font-size: 15px; font-weight: 600">{escape(title)}</text>'
        f"{rows}{inner}</svg>\n"
    )

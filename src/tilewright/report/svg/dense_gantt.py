"""Bars over time for many ranks as inline SVG: one path for each rank and colour, so that 256 ranks are one picture.

Ranks are lines from top to bottom; what is empty is idle time. Names are written where lines are high enough.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tilewright.core.units import format_seconds
from tilewright.report.svg.axes import Scale

Span = tuple[float, float]
"""Begin and end, in seconds."""

_CHAR, _RIGHT, _BASE, _TOP = 6.3, 14.0, 34.0, 6.0
_HIGHEST, _LOWEST, _HEIGHT = 18.0, 3.0, 760.0
"""Pixels of a line: as much as goes into the height, within these."""
_TEXT = 11.0
"""Pixels between two names, at least."""


@dataclass(frozen=True)
class GanttRow:
    """The bars of a rank.

    Example:
        >>> GanttRow("rank 0", {0: [(0.0, 1.0)], 1: [(1.0, 3.0)]}).busy_s
        3.0
    """

    name: str
    bars: Mapping[int, Sequence[Span]]
    """By colour (see `page.css`), rising."""
    text: str = ""
    """Shown under the pointer behind the name."""

    @property
    def busy_s(self) -> float:
        """Of all bars."""
        return math.fsum(end - begin for spans in self.bars.values() for begin, end in spans)


def dense_gantt(
    rows: Sequence[GanttRow], *, label: str, end_s: float, path: Sequence[tuple[int, Span]] = (), width: int = 1080
) -> str:
    """The chart.

    Args:
        rows: of ranks, from the top.
        label: what the chart shows.
        end_s: of the time axis, which begins at 0.
        path: (number of a row, span) of bars that are marked by a line through them and between them.
        width: in pixels.
    """
    left = max((len(row.name) for row in rows), default=0) * _CHAR + 12
    high = min(_HIGHEST, max(_LOWEST, _HEIGHT / max(len(rows), 1)))
    x = Scale(0.0, max(end_s, 1e-12), left, width - _RIGHT)
    every = max(1, math.ceil(_TEXT / high))
    base = _TOP + len(rows) * high
    parts = []
    for tick in x.ticks(8):
        at = f"{x(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{base:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{at}" y="{base + 15:.1f}" text-anchor="middle">'
            f"{escape(format_seconds(tick))}</text>"
        )
    for number, row in enumerate(rows):
        top = _TOP + number * high
        if number % every == 0:
            middle = top + min(high, _TEXT) / 2 + 4
            parts.append(
                f'<text class="rowname" x="{left - 8:.0f}" y="{middle:.1f}" text-anchor="end">{escape(row.name)}</text>'
            )
        bars = "".join(
            f'<path class="c{colour}" d="{_bars(spans, x, top, high * 0.86)}"/>' for colour, spans in row.bars.items()
        )
        parts.append(f'<g class="lane"><title>{escape(f"{row.name}: {row.text}")}</title>{bars}</g>')
    if path:
        parts.append(f'<path class="rule c3" d="{_line(path, x, high)}"/>')
    height = base + _BASE
    head = f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">'
    return head + "".join(parts) + "</svg>"


def _bars(spans: Sequence[Span], x: Scale, top: float, high: float) -> str:
    """Rectangles as one path. Bars that touch are told apart by a gap where they are wide enough for one."""
    found = []
    for begin, end in spans:
        wide = x(end) - x(begin)
        wide = wide - 0.4 if wide > 1.6 else wide
        found.append(f"M{x(begin):.1f} {top:.1f}h{wide:.2f}v{high:.1f}h-{wide:.2f}z")
    return "".join(found)


def _line(path: Sequence[tuple[int, Span]], x: Scale, high: float) -> str:
    points = []
    for number, (begin, end) in path:
        middle = _TOP + (number + 0.43) * high
        points += [f"{x(begin):.1f} {middle:.1f}", f"{x(end):.1f} {middle:.1f}"]
    return "M" + "L".join(points)

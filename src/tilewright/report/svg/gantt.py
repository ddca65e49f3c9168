"""Bars over time as inline SVG, a line of them for each rank. What is empty is idle time.

`gantt_chart` draws a few ranks, with a bar for each pass that has its name inside and its text under the pointer.
`dense_gantt` draws many: one path for each rank and colour, so that 256 ranks are one picture.
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
"""Pixels of a line of many: as much as goes into the height, within these."""
_GAP = 4.0
"""Pixels between two lines of a few."""
_TEXT = 11.0
"""Pixels between two names, at least."""
_LEAST = 0.25
"""Pixels of the thinnest bar."""


@dataclass(frozen=True)
class TimedBar:
    """One bar of a Gantt chart: its colour (see `page.css`), its seconds, the text inside where there is room, and the
    text under the pointer."""

    colour: int
    begin_s: float
    seconds: float
    name: str
    text: str


@dataclass(frozen=True)
class GanttRow:
    """The row of a Gantt chart: the bars of a rank.

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
        """Seconds of all bars in a row of the Gantt chart."""
        return math.fsum(end - begin for spans in self.bars.values() for begin, end in spans)


class _Lines:
    """Lines of bars with their names, over one axis of time that begins at 0.

    Args:
        names: of the lines, from the top.
        end_s: of the axis.
        width: of the picture, in pixels.
        high: pixels from one line to the next.
    """

    def __init__(self, names: Sequence[str], end_s: float, width: int, high: float) -> None:
        self._names, self._width, self.high = names, width, high
        self._left = max(map(len, names), default=0) * _CHAR + 12
        self.x = Scale(0.0, max(end_s, 1e-12), self._left, width - _RIGHT)

    def top(self, number: int) -> float:
        """The y coordinate of the upper edge of a line of the Gantt chart, in pixels."""
        return _TOP + number * self.high

    def svg(self, bars: Sequence[str], label: str) -> str:
        """Draw the Gantt chart: axis, names where lines are high enough, and bars."""
        base, every = self.top(len(self._names)), max(1, math.ceil(_TEXT / self.high))
        parts = []
        for tick in self.x.ticks(8):
            at = f"{self.x(tick):.1f}"
            parts.append(
                f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{base:.1f}"/>'
                f'<text class="tick" x="{at}" y="{base + 15:.1f}" text-anchor="middle">'
                f"{escape(format_seconds(tick))}</text>"
            )
        for number in range(0, len(self._names), every):
            middle = self.top(number) + min(self.high, _TEXT) / 2 + 4
            parts.append(
                f'<text class="rowname" x="{self._left - 8:.0f}" y="{middle:.1f}" text-anchor="end">'
                f"{escape(self._names[number])}</text>"
            )
        height = base + _BASE
        head = f'<svg viewBox="0 0 {self._width} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">'
        return "".join([head, *parts, *bars, "</svg>"])


def gantt_chart(rows: Sequence[tuple[str, Sequence[TimedBar]]], *, label: str, end_s: float, width: int = 1080) -> str:
    """A Gantt chart of a few ranks as SVG, a bar for each pass.

    Args:
        rows: a name, and its bars.
        label: what the chart shows.
        end_s: of the axis, which begins at 0.
        width: of the picture, in pixels.
    """
    lines = _Lines([name for name, _ in rows], end_s, width, _HIGHEST + _GAP)
    parts = []
    for number, (row, bars) in enumerate(rows):
        top = lines.top(number)
        for bar in bars:
            x = lines.x(bar.begin_s)
            wide, inside = max(lines.x(bar.begin_s + bar.seconds) - x - 0.3, _LEAST), ""
            if wide > len(bar.name) * _CHAR + 2:
                inside = (
                    f'<text class="inside" x="{x + wide / 2:.1f}" y="{top + _HIGHEST / 2 + 4:.1f}" '
                    f'text-anchor="middle">{escape(bar.name)}</text>'
                )
            parts.append(
                f'<g class="bar"><title>{escape(f"{row}: {bar.text}")}</title><rect class="c{bar.colour}" '
                f'style="fill-opacity:0.75" x="{x:.2f}" y="{top:.1f}" width="{wide:.2f}" '
                f'height="{_HIGHEST:.1f}"/>{inside}</g>'
            )
    return lines.svg(parts, label)


def dense_gantt(
    rows: Sequence[GanttRow], *, label: str, end_s: float, path: Sequence[tuple[int, Span]] = (), width: int = 1080
) -> str:
    """A Gantt chart of many ranks as SVG.

    Args:
        rows: of ranks, from the top.
        label: what the chart shows.
        end_s: of the time axis, which begins at 0.
        path: (number of a row, span) of bars that are marked by a line through them and between them.
        width: in pixels.
    """
    high = min(_HIGHEST, max(_LOWEST, _HEIGHT / max(len(rows), 1)))
    lines = _Lines([row.name for row in rows], end_s, width, high)
    parts = []
    for number, row in enumerate(rows):
        bars = "".join(
            f'<path class="c{colour}" d="{_bars(spans, lines.x, lines.top(number), high * 0.86)}"/>'
            for colour, spans in row.bars.items()
        )
        parts.append(f'<g class="lane"><title>{escape(f"{row.name}: {row.text}")}</title>{bars}</g>')
    if path:
        points = [(lines.x(at), lines.top(number) + 0.43 * high) for number, span in path for at in span]
        parts.append(f'<path class="rule c3" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
    return lines.svg(parts, label)


def _bars(spans: Sequence[Span], x: Scale, top: float, high: float) -> str:
    """Draw bars of a Gantt chart as one path. Bars that touch are kept apart by a gap if they are wide enough for
    one."""
    found = []
    for begin, end in spans:
        wide = x(end) - x(begin)
        wide = wide - 0.4 if wide > 1.6 else wide
        found.append(f"M{x(begin):.1f} {top:.1f}h{wide:.2f}v{high:.1f}h-{wide:.2f}z")
    return "".join(found)

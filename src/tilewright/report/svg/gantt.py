"""Bars over time as inline SVG, a line of them for each rank. What a bar is shows under the pointer."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CHAR, _RIGHT, _BASE = 6.3, 14.0, 30.0
_HEIGHT, _GAP = 18.0, 4.0
_LEAST = 0.25
"""Pixels of the thinnest bar."""


@dataclass(frozen=True)
class TimedBar:
    """One bar: its colour (see `page.css`), when in seconds, what is written in it where there is room, and what shows
    under the pointer."""

    colour: int
    begin_s: float
    seconds: float
    name: str
    text: str


def gantt_chart(rows: Sequence[tuple[str, Sequence[TimedBar]]], *, label: str, end_s: float, width: int = 1080) -> str:
    """Rows of bars over one axis of milliseconds.

    Args:
        rows: a name, and its bars.
        label: what the chart shows.
        end_s: of the axis, which begins at 0.
        width: of the picture, in pixels.
    """
    left = max((len(name) for name, _ in rows), default=0) * _CHAR + 12
    scale = (width - left - _RIGHT) / max(end_s, 1e-9)
    parts = []
    for number, (name, bars) in enumerate(rows):
        top = 4 + number * (_HEIGHT + _GAP)
        middle = top + _HEIGHT / 2 + 4
        parts.append(
            f'<text class="rowname" x="{left - 8:.0f}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
            f'<line class="grid" x1="{left:.1f}" x2="{width - _RIGHT:.1f}" y1="{top + _HEIGHT:.1f}" '
            f'y2="{top + _HEIGHT:.1f}"/>'
        )
        for bar in bars:
            x, wide = left + bar.begin_s * scale, max(bar.seconds * scale - 0.3, _LEAST)
            inside = ""
            if wide > len(bar.name) * _CHAR + 2:
                inside = (
                    f'<text class="tick" x="{x + wide / 2:.1f}" y="{middle:.1f}" text-anchor="middle">'
                    f"{escape(bar.name)}</text>"
                )
            parts.append(
                f'<g class="bar"><title>{escape(f"{name}: {bar.text}")}</title><rect class="c{bar.colour}" '
                f'style="fill-opacity:0.75" x="{x:.2f}" y="{top:.1f}" width="{wide:.2f}" '
                f'height="{_HEIGHT:.1f}"/>{inside}</g>'
            )
    base = 4 + len(rows) * (_HEIGHT + _GAP)
    for i in range(6):
        at = left + end_s * scale * i / 5
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{base + 14:.1f}" text-anchor="middle">{1e3 * end_s * i / 5:.4g}</text>'
        )
    height = base + _BASE
    parts.append(f'<text class="unit" x="{width - _RIGHT}" y="{height - 2:.1f}" text-anchor="end">milliseconds</text>')
    head = f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">'
    return head + "".join(parts) + "</svg>"

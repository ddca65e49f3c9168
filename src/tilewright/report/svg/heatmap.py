"""Maps of layers by steps as inline SVG: a cell for each, coloured by kind or by strength.

A cell may hold several bars, one below the other. Values show on hover, as in `charts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_CHAR = 6.3
_BAR, _GAP, _BASE, _RIGHT = 4.0, 2.0, 34.0, 14.0
_COLUMNS = 60
"""Most columns that are drawn; of more, every second, third, ... one."""


@dataclass(frozen=True)
class Bar:
    """One bar in a cell of a heat map: its colour (see `page.css`), its strength from 0 to 1, and the text under the
    pointer."""

    colour: int
    strength: float
    text: str


def heat_map(
    rows: Sequence[tuple[str, Sequence[Sequence[Bar]]]], xs: Sequence[float], *, label: str, width: int = 1080
) -> str:
    """Draw a heat map: rows of cells over steps.

    Args:
        rows: a name and, for each of `xs`, the bars of its cell; none where nothing is known.
        xs: steps, rising.
        label: what the map shows.
        width: of the picture, in pixels.
    """
    # Steps are left out where cells would be narrower than a picture can show.
    stride = -(-len(xs) // _COLUMNS)
    kept = range(0, len(xs), stride)
    bars = max((len(cell) for _, cells in rows for cell in cells), default=1)
    high = max(bars * _BAR, 11.0)
    left = max((len(name) for name, _ in rows), default=0) * _CHAR + 12
    wide = (width - left - _RIGHT) / max(len(kept), 1)
    parts = []
    for number, (name, cells) in enumerate(rows):
        top = 4 + number * (high + _GAP)
        at = top + high / 2 + 4
        parts.append(f'<text class="rowname" x="{left - 8:.0f}" y="{at:.1f}" text-anchor="end">{escape(name)}</text>')
        for column, i in enumerate(kept):
            x = left + column * wide
            parts += [
                f'<g class="bar"><title>{escape(f"{name}, step {xs[i]:g}: {bar.text}")}</title>'
                f'<rect class="c{bar.colour}" style="fill-opacity:{0.12 + 0.88 * bar.strength:.2f}" x="{x:.1f}" '
                f'y="{top + j * high / len(cells[i]):.1f}" width="{max(wide - 0.6, 0.6):.1f}" '
                f'height="{high / len(cells[i]) - 0.3:.1f}"/></g>'
                for j, bar in enumerate(cells[i])
            ]
    # At most about eight labels.
    base = 4 + len(rows) * (high + _GAP)
    ticks = list(kept)[:: max(1, len(kept) // 8)]
    for i in ticks:
        at = left + (i // stride + 0.5) * wide
        parts.append(f'<text class="tick" x="{at:.1f}" y="{base + 14:.1f}" text-anchor="middle">{xs[i]:g}</text>')
    height = base + _BASE
    parts.append(f'<text class="unit" x="{width - _RIGHT}" y="{height - 4:.1f}" text-anchor="end">step</text>')
    head = f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label, quote=True)}">'
    return head + "".join(parts) + "</svg>"

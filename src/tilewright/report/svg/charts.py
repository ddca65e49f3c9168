"""Inline SVG charts without a library: lines, stacked areas, horizontal bars, a histogram with a curve.

Each function returns one `<svg>` element as text, everything escaped. Colours, light and dark, come from
the page's style sheet by class (`c0` ... `c7`), so the same picture serves both. Values show on hover
without a script: a transparent strip over each point carries a `<title>` and uncovers a small box.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tilewright.report.svg.axes import FORMATS, Scale, format_number, format_tick, from_log, make_scale
from tilewright.report.template import read

_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 30.0, 34.0
_LEGEND_LINE = 18
_CHAR = 6.1
"""Width of a character of the tip box at its font size, in pixels."""


@dataclass(frozen=True)
class Series:
    """One line or area. `kind`: line, faint (raw values behind a smoothed line), dots, step."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    kind: str = "line"


@dataclass(frozen=True)
class Mark:
    """A moment that a chart marks on the x axis: an automatic decision, a resume. `colour` as in Series."""

    x: float
    label: str
    colour: int = 3


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    y_label: str,
    x_label: str = "step",
    y_format: str = "number",
    log_x: bool = False,
    log_y: bool = False,
    zero: bool = False,
    binary: bool = False,
    marks: Sequence[Mark] = (),
    size: tuple[int, int] = (520, 240),
) -> str:
    """A line chart over a common x axis. Points that are not finite leave a gap; a log axis leaves out values <= 0 of
    y, and those of x are above.

    `binary` puts the ticks of y on powers of two. A line of few points gets a dot at each.
    """
    width, height = size
    series = [_thin(s, width) for s in series]
    x = make_scale([v for s in series for v in s.xs] + [m.x for m in marks], _LEFT, width - _RIGHT)
    x = Scale(*_span(series, marks, x), _LEFT, width - _RIGHT, log_x)
    y = make_scale([v for s in series for v in s.ys], height - _BOTTOM, _TOP, log=log_y, zero=zero)
    parts = [_axes(x, y, size, x_label, y_label, FORMATS[y_format], binary or y_format == "bytes")]
    parts += [_mark(mark, x(mark.x), height) for mark in marks]
    for s in series:
        points = [(x(a), y(b)) if _shown(b, log_y) else None for a, b in zip(s.xs, s.ys, strict=True)]
        if s.kind == "dots" or len(points) == 1:
            parts += [f'<circle class="dot c{s.colour}" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="3"/>' for p in points if p]
        else:
            parts.append(f'<path class="{s.kind} c{s.colour}" d="{_path(points, s.kind == "step")}"/>')
            if s.kind == "line" and len(points) <= 12:
                parts += [
                    f'<circle class="c{s.colour} point" cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="2.6"/>' for p in points if p
                ]
    parts.append(_hover(series, x, y, size, x_label, FORMATS[y_format], log_y))
    return _svg(parts, size, label)


def stacked_area(
    series: Sequence[Series], *, label: str, y_label: str, x_label: str = "step", size: tuple[int, int] = (520, 240)
) -> str:
    """A chart of stacked areas, first at the bottom; all series share their xs. y is bytes."""
    width, height = size
    series = [_thin(s, width) for s in series]
    xs = list(series[0].xs)
    x = Scale(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, _LEFT, width - _RIGHT)
    tops = [[0.0] * len(xs)]
    for s in series:
        tops.append([low + value for low, value in zip(tops[-1], s.ys, strict=True)])
    y = make_scale(tops[-1], height - _BOTTOM, _TOP, zero=True)
    parts = [_axes(x, y, size, x_label, y_label, FORMATS["bytes"], True)]
    for s, low, high in zip(series, tops, tops[1:], strict=False):
        upper = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, high, strict=True)]
        lower = [f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, low, strict=True)]
        parts.append(f'<path class="area c{s.colour}" d="M{" L".join(upper + lower[::-1])}Z"/>')
    parts.append(_hover(series, x, y, size, x_label, FORMATS["bytes"], False))
    return _svg(parts, size, label)


def bar_chart(
    rows: Sequence[tuple[str, Sequence[float | None]]],
    names: Sequence[str],
    *,
    label: str,
    value_format: str = "number",
    width: int = 520,
) -> str:
    """A bar chart, one group a row with one horizontal bar for each of `names`; None is written as 'not recorded'."""
    fmt = FORMATS[value_format]
    bar, gap = 13, 12
    group = bar * len(names) + gap
    height = group * len(rows) + 8
    left, right = 96.0, 92.0
    largest = max((v for _, values in rows for v in values if v is not None), default=0.0) or 1.0
    x = Scale(0, largest, left, width - right)
    parts = []
    for i, (name, values) in enumerate(rows):
        top = 4 + i * group
        middle = top + bar * len(names) / 2 + 4
        parts.append(
            f'<text class="rowname" x="{left - 10:.0f}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for j, value in enumerate(values):
            text = "not recorded" if value is None else fmt(value)
            long = 0.0 if value is None else max(x(value) - left, 1.0 if value else 0.0)
            tip = escape(f"{name}, {names[j]}: {text}")
            y_top, y_text, x_text = top + j * bar, top + (j + 1) * bar - 3.5, left + long + 6
            parts.append(
                f'<g class="bar"><title>{tip}</title><rect class="c{j}" x="{left}" y="{y_top}" width="{long:.1f}" '
                f'height="{bar - 2}" rx="1.5"/><text class="value" x="{x_text:.1f}" y="{y_text:.1f}">'
                f"{escape(text)}</text></g>"
            )
    return _svg(parts, (width, height), label)


def histogram(
    values: Sequence[float],
    curve: Callable[[float], float] | None,
    *,
    label: str,
    x_label: str,
    size: tuple[int, int] = (520, 240),
    log_x: bool = True,
) -> str:
    """Draw a histogram of positive values in equal bins of their logarithm (or of themselves), and a density to
    compare.

    `curve` is a density in the binned coordinate (the natural logarithm on a log axis) that integrates to 1.
    """
    width, height = size
    coords = sorted(math.log(v) if log_x else v for v in values)
    # Rice's rule, and half as many bins again: 2 n^(1/3) * 1.5, within 6 to 40.
    num_bins = max(6, min(40, round(2 * len(coords) ** (1 / 3) * 1.5)))
    low, high = coords[0], coords[-1]
    # Equal values would have bins of no width.
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    step = (high - low) / num_bins
    counts = [0] * num_bins
    for value in coords:
        counts[min(int((value - low) / step), num_bins - 1)] += 1
    edges = [low + i * step for i in range(num_bins + 1)]
    back = from_log if log_x else float
    # The curve goes one bin beyond both ends, in the units of the bars: values per bin.
    grid = [low - step + (high - low + 2 * step) * i / 120 for i in range(121)]
    heights = [curve(g) * len(coords) * step for g in grid] if curve else [0.0]
    x = Scale(back(grid[0]), back(grid[-1]), _LEFT, width - _RIGHT, log_x)
    y = make_scale([*counts, *heights], height - _BOTTOM, _TOP, zero=True)
    parts = [_axes(x, y, size, x_label, "steps", format_number, False)]
    for count, a, b in zip(counts, edges, edges[1:], strict=False):
        left, right = x(back(a)), x(back(b))
        tip = f"{format_number(back(a))} to {format_number(back(b))}: {count}"
        parts.append(
            f'<g class="bar"><title>{escape(tip)}</title><rect class="c0 bin" x="{left + 0.5:.1f}" y="{y(count):.1f}" '
            f'width="{max(right - left - 1, 0.5):.1f}" height="{y(0) - y(count):.1f}"/></g>'
        )
    if curve:
        points = [(x(back(g)), y(h)) for g, h in zip(grid, heights, strict=True)]
        parts.append(f'<path class="line c1" d="{_path(points, False)}"/>')
    return _svg(parts, size, label)


def standalone(chart: str, title: str, legend: Sequence[str], size: tuple[int, int]) -> str:
    """A chart of that size with its style, title and a legend for each colour, as a file of its own."""
    width, height = size
    css = read("page.css")
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


def _svg(parts: Sequence[str], size: tuple[int, int], label: str) -> str:
    width, height = size
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label, quote=True)}">'
    return head + "".join(parts) + "</svg>"


def _axes(
    x: Scale, y: Scale, size: tuple[int, int], x_label: str, y_label: str, fmt: Callable[[float], str], binary: bool
) -> str:
    width, height = size
    tick_of = format_tick if fmt is format_number else fmt
    parts = [f'<text class="unit" x="0" y="12">{escape(y_label)}</text>']
    for tick in y.ticks(5, binary):
        at = y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 3.5:.1f}" text-anchor="end">{escape(tick_of(tick))}</text>'
        )
    base = height - _BOTTOM
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{base}" y2="{base}"/>')
    ticks = x.ticks(max(3, width // 130))
    whole = [tick for tick in ticks if float(tick).is_integer()]
    for tick in whole if x_label == "step" and len(whole) > 1 else ticks:
        at = x(tick)
        parts.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{base + 16}" text-anchor="middle">{escape(format_tick(tick))}</text>'
        )
    parts.append(f'<text class="unit" x="{width - _RIGHT}" y="{height - 3}" text-anchor="end">{escape(x_label)}</text>')
    return "".join(parts)


def _mark(mark: Mark, at: float, height: float) -> str:
    base = height - _BOTTOM
    return (
        f'<g class="mark c{mark.colour}"><title>{escape(mark.label)}</title>'
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 4}" y2="{base}"/>'
        f'<path d="M{at - 4:.1f},{_TOP - 10} h8 l-4,7Z"/></g>'
    )


def _path(points: Sequence[tuple[float, float] | None], step: bool) -> str:
    """The d attribute of a chart's line with gaps; `step` holds a value until the next one."""
    out, pen_down, last_y = [], False, 0.0
    for point in points:
        if point is None:
            pen_down = False
            continue
        if pen_down and step:
            out.append(f"L{point[0]:.1f},{last_y:.1f}")
        out.append(f"{'L' if pen_down else 'M'}{point[0]:.1f},{point[1]:.1f}")
        pen_down, last_y = True, point[1]
    return "".join(out)


def _shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _span(series: Sequence[Series], marks: Sequence[Mark], fallback: Scale) -> tuple[float, float]:
    xs = [v for s in series for v in s.xs] + [m.x for m in marks]
    return (min(xs), max(xs)) if xs and max(xs) > min(xs) else (fallback.low, fallback.high)


def _thin(series: Series, width: int) -> Series:
    """Thin a chart's points to about one every two pixels: of each stretch the lowest and the highest value stay, in
    order."""
    limit = width // 2
    if len(series.xs) <= limit:
        return series
    keep: list[int] = []
    stretch = math.ceil(len(series.xs) * 2 / limit)
    for start in range(0, len(series.xs), stretch):
        block = range(start, min(start + stretch, len(series.xs)))
        keep += sorted({min(block, key=lambda i: series.ys[i]), max(block, key=lambda i: series.ys[i])})
    keep = sorted({0, *keep, len(series.xs) - 1})
    return Series(series.name, [series.xs[i] for i in keep], [series.ys[i] for i in keep], series.colour, series.kind)


def _hover(
    series: Sequence[Series],
    x: Scale,
    y: Scale,
    size: tuple[int, int],
    x_label: str,
    fmt: Callable[[float], str],
    log: bool,
) -> str:
    """Draw invisible strips over a chart with the values at each x: a title for readers, a box that shows under the
    pointer."""
    width, height = size
    values: dict[float, list[tuple[Series, float]]] = {}
    for s in series:
        for a, b in zip(s.xs, s.ys, strict=True):
            values.setdefault(a, []).append((s, b))
    xs = sorted(values)
    stride = -(-max(len(xs), 1) // max(1, width // 6))
    xs = xs[::stride]
    parts = []
    for i, a in enumerate(xs):
        left = x(a) if i == 0 else (x(xs[i - 1]) + x(a)) / 2
        right = x(a) if i == len(xs) - 1 else (x(a) + x(xs[i + 1])) / 2
        lines = [f"{x_label} {format_number(a)}", *(f"{s.name} {fmt(b)}" for s, b in values[a])]
        dots = "".join(
            f'<circle class="c{s.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>'
            for s, b in values[a]
            if _shown(b, log)
        )
        parts.append(
            f'<g class="pt"><title>{escape(", ".join(lines))}</title><rect class="hit" x="{left - 0.5:.1f}" y="{_TOP}" '
            f'width="{right - left + 1:.1f}" height="{height - _TOP - _BOTTOM}"/><g class="tip">{dots}'
            f"{_tip_box(lines, x(a), width)}</g></g>"
        )
    return "".join(parts)


def _tip_box(lines: Sequence[str], at: float, width: float) -> str:
    long = max(len(line) for line in lines) * _CHAR + 14
    left = at + 8 if at + 8 + long < width else at - 8 - long
    rows = "".join(
        f'<text x="{left + 7:.1f}" y="{_TOP + 14 + 14 * i:.1f}">{escape(line)}</text>' for i, line in enumerate(lines)
    )
    box = f'<rect class="box" x="{left:.1f}" y="{_TOP}" width="{long:.1f}" height="{14 * len(lines) + 8}" rx="3"/>'
    return box + rows

"""A table as lines of text: whole rows without a width to fit, else wrapped cells, else one block per row.

Cells break between words, and inside a word only after the dots, slashes and commas of names.
"""

import re
import textwrap
from collections.abc import Sequence

from tilewright.core.units import HARD_SPACE, bind_units

_GAP = "  "
# Breaks inside names and paths: after a separator that a letter or a brace follows, so that 1.22 GiB stays whole.
_BREAK = re.compile(r"(?<=[./,])(?=[A-Za-z{])")


def lay_out(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Lay out a table as lines of text, the heading first.

    Args:
        columns: headings.
        rows: cells; as many in each row as there are columns.
        width: columns of the terminal; None: each row is one line, so that grep finds it.

    Example:
        >>> for line in lay_out(("layer", "kernel"), [("layers.0.up", "the one that is fast")], 24):
        ...     print(line)
        layer        kernel
        layers.0.up  the one
                     that is
                     fast
        >>> for line in lay_out(("layer", "kernel"), [("lm_head", "native")], 12):
        ...     print(line)
        lm_head
          kernel  native
    """
    cells = [list(columns), *([bind_units(cell) for cell in row] for row in rows)]
    natural = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for gap in ("  ", " "):
        if width is None or sum(natural) + len(gap) * (len(columns) - 1) <= width:
            return [_line(row, natural, gap) for row in cells]
    least = [max(len(piece) for row in cells for piece in _pieces(row[i])) for i in range(len(columns))]
    for_cells = width - len(_GAP) * (len(columns) - 1)
    if sum(least) > for_cells:
        return [line for row in cells[1:] for line in _block(columns, row, width)]
    widths = _shared(least, natural, for_cells)
    lines = []
    for row in cells:
        wrapped = [_wrapped(cell, limit) for cell, limit in zip(row, widths, strict=True)]
        for i in range(max(map(len, wrapped))):
            lines.append(_line([cell[i] if i < len(cell) else "" for cell in wrapped], widths))
    return lines


def _line(row: Sequence[str], widths: Sequence[int], gap: str = _GAP) -> str:
    cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    return gap.join(cells).rstrip().replace(HARD_SPACE, " ")


def _pieces(cell: str) -> list[str]:
    """Pieces of a table's cell that stay whole in the layout."""
    return [piece for word in cell.split() for piece in _BREAK.split(word)] or [""]


def _wrapped(cell: str, width: int) -> list[str]:
    """Wrapped lines of a table's cell in the layout."""
    lines = [""]
    for word in cell.split():
        for number, piece in enumerate(_BREAK.split(word)):
            gap = " " if number == 0 and lines[-1] else ""
            if lines[-1] and len(lines[-1] + gap + piece) > width:
                lines.append(piece)
            else:
                lines[-1] += gap + piece
    return lines


def _shared(least: Sequence[int], natural: Sequence[int], width: int) -> list[int]:
    """Divide a table's width among its columns: each gets the least that it needs, and those that need little more get
    all of it."""
    widths, rest = list(least), width - sum(least)
    order = sorted(range(len(least)), key=lambda i: natural[i] - least[i])
    for done, i in enumerate(order):
        more = min(natural[i] - least[i], rest // (len(order) - done))
        widths[i] += more
        rest -= more
    return widths


def _block(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """Lay out one row as a block: its first cell, then a line for each other cell that is not empty."""
    lines = _wrapped(row[0], width) if row[0] else []
    label = max(map(len, columns[1:]), default=0)
    for name, cell in zip(columns[1:], row[1:], strict=True):
        if cell not in ("", "-"):
            wrapped = _wrapped(cell, max(width - label - 4, 1))
            lines.append(f"  {name:<{label}}{_GAP}{wrapped[0]}")
            lines += textwrap.indent("\n".join(wrapped[1:]), " " * (label + 4)).splitlines()
    return [line.replace(HARD_SPACE, " ") for line in lines]

"""Tables at any width: no line is too long, nothing is lost, numbers keep their units."""

import re

from hypothesis import given
from hypothesis import strategies as st

from tilewright.cli.table_layout import lay_out

WORDS = st.sampled_from(
    ["7", "1.22 GiB", "14 ms", "model.layers.{0-5}.mlp.up_proj", "a", "keep", "recompute", "3 %", "-"]
)
CELLS = st.lists(WORDS, max_size=6).map(" ".join)
TABLES = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from(["layer", "number", "time per layer"]), min_size=n, max_size=n),
        st.lists(st.lists(CELLS, min_size=n, max_size=n), max_size=4),
    )
)


def letters(text: str) -> list[str]:
    """What is printed, in any order."""
    return sorted(re.sub(r"\s", "", text))


@given(TABLES, st.integers(40, 120))
def test_no_line_is_too_long_and_nothing_is_lost(table, width):
    columns, rows = table
    lines = lay_out(columns, rows, width)
    assert max(map(len, lines), default=0) <= width
    whole = letters(" ".join(columns) + " ".join(cell for row in rows for cell in row))
    shown = [
        [row[0], *(n + c for n, c in zip(columns[1:], row[1:], strict=True) if c not in ("", "-"))] for row in rows
    ]
    blocks = letters("".join(part for row in shown for part in row))
    assert letters(" ".join(lines)) in (whole, blocks)
    text = "\n".join(lines)
    for unit in ("GiB", "ms", "%"):
        assert len(re.findall(rf"\d {unit}", text)) == len(re.findall(unit, text))


@given(TABLES)
def test_without_a_width_each_row_is_one_line(table):
    columns, rows = table
    lines = lay_out(columns, rows, None)
    assert len(lines) == 1 + len(rows)
    assert lines == lay_out(columns, rows, 10**6)


def test_columns_are_aligned_where_they_are_wrapped():
    lines = lay_out(("op", "why"), [("linear", "one two three four"), ("x", "five")], 18)
    assert lines == ["op      why", "linear  one two", "        three four", "x       five"]


def test_too_narrow_for_columns_is_a_block_per_row():
    lines = lay_out(("op", "kernel", "note"), [("rms_norm_quantize", "native", "-")], 24)
    assert lines == ["rms_norm_quantize", "  kernel  native"]

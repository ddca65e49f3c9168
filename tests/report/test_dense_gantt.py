"""The chart of many ranks: well-formed, readable at 8 and at 256 ranks, bars where their times are."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from tilewright.report.svg.dense_gantt import GanttRow, dense_gantt


def chart(ranks, bars=40):
    spans = [(float(i), i + 0.8) for i in range(bars)]
    rows = [GanttRow(f"rank {rank}", {0: spans[::2], 1: spans[1::2]}, "a < b") for rank in range(ranks)]
    return dense_gantt(rows, label="a & b", end_s=float(bars), path=[(0, spans[0]), (ranks - 1, spans[1])])


@pytest.mark.parametrize("ranks", [1, 8, 32, 256])
def test_names_do_not_overlap_and_the_picture_fits_a_page(ranks):
    svg = chart(ranks)
    root = ElementTree.fromstring(svg)
    ys = [float(text.attrib["y"]) for text in root.iter("text") if text.attrib["class"] == "rowname"]
    assert ys
    assert all(after - before >= 11 for before, after in itertools.pairwise(ys))
    assert float(root.attrib["viewBox"].split()[3]) <= 820
    assert len(list(root.iter("title"))) == ranks
    assert len(svg) < 2_000_000


def test_bars_are_where_their_times_are():
    svg = dense_gantt([GanttRow("r", {2: [(0.0, 1.0), (3.0, 4.0)]})], label="l", end_s=4.0, width=1000)
    (path,) = [p for p in ElementTree.fromstring(svg).iter("path") if p.attrib["class"] == "c2"]
    bars = re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", path.attrib["d"])
    (first, _, wide, _), (second, *_) = bars
    scale = (float(second) - float(first)) / 3.0
    assert float(wide) == pytest.approx(scale, abs=0.6)
    assert float(second) + scale == pytest.approx(1000 - 14, abs=0.2)


def test_a_chart_without_rows_or_time_is_one():
    ElementTree.fromstring(dense_gantt([], label="nothing", end_s=0.0))
    ElementTree.fromstring(dense_gantt([GanttRow("r", {})], label="nothing", end_s=0.0))

"""The chart of many ranks: well-formed, readable at 8 and at 256 ranks, bars where their times are."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from tilewright.report.svg.gantt import GanttRow, TimedBar, dense_gantt, gantt_chart


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


def test_a_bar_for_each_pass_is_where_its_time_is_and_has_its_text():
    bars = [
        TimedBar(1, 0.0, 1.0, "F0", "forward < 1"),
        TimedBar(2, 3.0, 1.0, "B0", "backward"),
        TimedBar(3, 4, 0, "", ""),
    ]
    root = ElementTree.fromstring(gantt_chart([("rank 0", bars)], label="a & b", end_s=4.0, width=1000))
    first, second, empty = [rect.attrib for rect in root.iter("rect")]
    begin, end = float(first["x"]), 1000 - 14
    assert float(second["x"]) == pytest.approx(begin + 0.75 * (end - begin), abs=0.02)
    assert float(first["width"]) == pytest.approx((end - begin) / 4, abs=0.4)
    assert float(empty["width"]) > 0
    assert [title.text for title in root.iter("title")][:2] == ["rank 0: forward < 1", "rank 0: backward"]
    assert {"F0", "B0", "rank 0"} <= {text.text for text in root.iter("text")}
    ElementTree.fromstring(gantt_chart([], label="nothing", end_s=0.0))

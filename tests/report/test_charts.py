"""Charts: valid markup, values on hover, scales that map as they say."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tilewright.report.run_data.stats import fit_log_normal, smooth
from tilewright.report.svg.axes import format_number, make_scale
from tilewright.report.svg.charts import Mark, Series, bar_chart, histogram, line_chart, stacked_area

numbers = st.floats(-1e12, 1e12, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-200)


@given(st.lists(numbers, max_size=30), st.booleans(), st.booleans())
def test_scale_keeps_values_inside_and_ticks_rise(values, log, zero):
    scale = make_scale(values, 200.0, 10.0, log=log, zero=zero)
    for value in values:
        if value > 0 or not log:
            assert 10 - 1e-6 <= scale(value) <= 200 + 1e-6
    ticks = scale.ticks()
    assert ticks == sorted(set(ticks))
    slack = 1e-8 * (scale.high - scale.low)
    assert all(scale.low - slack <= tick <= scale.high + slack for tick in ticks)
    assert len(ticks) <= 16


@pytest.mark.parametrize(("low", "high"), [(1, 10), (0.02, 0.9), (1, 1e6), (3, 4), (2.0**15, 2.0**17)])
@pytest.mark.parametrize("binary", [False, True])
def test_log_axis_has_ticks(low, high, binary):
    assert len(make_scale([low, high], 100, 0, log=True).ticks(binary=binary)) >= (2 if high / low >= 2 else 1)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_line_chart_is_wellformed_and_names_every_value_on_hover():
    xs, ys = [1.0, 2.0, 3.0], [0.5, 0.25, 0.125]
    svg = line_chart([Series("loss", xs, ys)], label="a < b & c", y_label="nats", marks=[Mark(2, "<resume>")])
    root = parse(svg)
    assert root.attrib["aria-label"] == "a < b & c"
    titles = [element.text for element in root.iter("title")]
    assert "<resume>" in titles
    for x, y in zip(xs, ys, strict=True):
        assert f"step {format_number(x)}, loss {format_number(y)}" in titles


def test_points_that_are_not_numbers_leave_a_gap():
    svg = line_chart([Series("s", [1, 2, 3, 4, 5], [1, 1, math.nan, 1, 1])], label="l", y_label="y")
    path = next(p for p in parse(svg).iter("path") if p.attrib["class"].startswith("line"))
    assert path.attrib["d"].count("M") == 2


def test_log_axis_leaves_out_zero():
    svg = line_chart([Series("s", [1, 2, 3], [1, 0, 10])], label="l", y_label="y", log_y=True)
    assert "nan" not in svg
    path = next(p for p in parse(svg).iter("path") if p.attrib["class"].startswith("line"))
    assert path.attrib["d"].count("M") == 2


def test_a_log_axis_of_x_says_values_and_has_marks_among_them():
    """Histograms of word counts named the number of a bin, 10, where it begins with 512 words."""
    xs = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    svg = line_chart(
        [Series("s", xs, xs)], label="l", y_label="y", x_label="words", log_x=True, marks=[Mark(50, "min")]
    )
    root = parse(svg)
    ticks = {e.text for e in root.iter("text") if e.attrib.get("class") == "tick"}
    assert {"1", "10", "100"} <= ticks
    mark = next(group for group in root.iter("g") if group.attrib.get("class", "").startswith("mark"))
    at = float(next(mark.iter("line")).attrib["x1"])
    path = next(p for p in root.iter("path") if p.attrib.get("class", "").startswith("line"))
    places = [float(x) for x in re.findall(r"[ML]([\d.]+),", path.attrib["d"])]
    assert places[xs.index(32)] < at < places[xs.index(64)]
    steps = [right - left for left, right in pairwise(places)]
    assert max(steps) - min(steps) < 0.3, "each doubling has the same width"


def test_long_series_are_thinned_but_keep_their_extremes():
    ys = [1.0] * 50_000
    ys[31_234], ys[40_001] = 99.0, -7.0
    svg = line_chart([Series("s", list(range(50_000)), ys)], label="l", y_label="y")
    assert len(svg) < 120_000
    path = next(p for p in parse(svg).iter("path") if p.attrib["class"].startswith("line"))
    heights = [float(y) for y in re.findall(r",([\d.]+)", path.attrib["d"])]
    assert max(heights) - min(heights) > 150, "both spikes are drawn"


def test_single_point_and_constant_values():
    parse(line_chart([Series("s", [1], [3])], label="l", y_label="y"))
    parse(line_chart([Series("s", [1, 2], [0, 0])], label="l", y_label="y", zero=True))
    parse(histogram([0.5] * 10, None, label="l", x_label="x"))


def test_stacked_area_reaches_the_sum():
    series = [Series("a", [1, 2], [10, 20]), Series("b", [1, 2], [30, 40])]
    root = parse(stacked_area(series, label="l", y_label="bytes"))
    heights = []
    for path in root.iter("path"):
        ys = [float(y) for y in re.findall(r",([\d.]+)", path.attrib["d"])]
        heights.append((min(ys), max(ys)))
    base = heights[0][1]
    assert (base - heights[1][0]) / (base - heights[0][0]) == pytest.approx(60 / 20, rel=0.01)


def test_bars_are_in_proportion_and_say_what_is_missing():
    svg = bar_chart([("a", [10, 5]), ("b", [None, 10])], ("planned", "measured"), label="l", value_format="bytes")
    root = parse(svg)
    widths = [float(rect.attrib["width"]) for rect in root.iter("rect")]
    assert widths[0] == widths[3] == pytest.approx(2 * widths[1], abs=0.11)
    assert widths[2] == 0
    assert "b, planned: not recorded" in [t.text for t in root.iter("title")]


def test_histogram_counts_every_value():
    values = [math.exp(0.01 * i) for i in range(137)]
    root = parse(histogram(values, None, label="l", x_label="x"))
    counts = [int(t.text.rsplit(": ", 1)[1]) for t in root.iter("title")]
    assert sum(counts) == 137


def test_log_normal_fit_against_scipy():
    values = stats.lognorm(s=0.4, scale=0.7).rvs(500, random_state=1).tolist()
    fit = fit_log_normal(values)
    logs = [math.log(v) for v in values]
    expected = stats.kstest(logs, "norm", args=(fit.mu, fit.sigma)).statistic
    assert fit.distance == pytest.approx(expected, rel=1e-9)
    assert fit.skew == pytest.approx(stats.skew(logs), rel=1e-9)
    assert fit.follows
    assert not fit_log_normal([0.1 + 0.001 * i for i in range(200)] + [50.0] * 40).follows


def test_fit_needs_values_that_differ():
    assert fit_log_normal([1.0] * 50) is None
    assert fit_log_normal([1.0, 2.0, 3.0]) is None


def test_smoothing_does_not_lag_on_a_slope():
    xs = list(range(1000))
    points, values = smooth(xs, [3.0 - 0.01 * x for x in xs], 100)
    assert len(points) <= 401
    assert points[-1] == 999
    worst = max(abs(v - (3.0 - 0.01 * x)) for x, v in zip(points, values, strict=True))
    assert worst < 1e-9

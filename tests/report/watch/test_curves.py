"""Columns and downsampling against `collect`, which reads the same files as a whole, and against plain loops."""

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.report.run_data.collect_run import collect
from tilewright.report.run_data.run_numbers import held_out_losses
from tilewright.report.watch.curves import Metrics, downsample, stretch_for
from tilewright.report.watch.server import compact_json

VALUES = st.none() | st.floats() | st.integers(-(10**400), 10**400) | st.booleans() | st.text(max_size=3)
STEPS = st.integers(-2, 12) | st.sampled_from([True, 2**60, "3", None, 1.5])
TRAINING = st.fixed_dictionaries({"step": STEPS}, optional={"loss": VALUES, "norm": VALUES, "time_s": VALUES})
DOMAIN = st.fixed_dictionaries({"loss": VALUES, "tokens": VALUES}) | st.none()
EVALUATION = st.fixed_dictionaries({"step": STEPS, "eval": st.dictionaries(st.sampled_from("ab"), DOMAIN)})


@pytest.fixture
def folder(tmp_path):
    """Written by each example."""
    return tmp_path


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(TRAINING | EVALUATION, max_size=15))
def test_columns_are_those_of_the_report(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = collect(folder)
    metrics = Metrics()
    for row in rows:
        metrics.add(json.loads(json.dumps(row)))
    for name in ("loss", "norm"):
        steps, values = metrics.training.curve(name)
        good = np.isfinite(values)
        assert list(zip(steps[good], values[good], strict=True)) == list(zip(*expected.column(name), strict=True))
    steps, values = metrics.evaluation.curve("held_out")
    good = np.isfinite(values)
    np.testing.assert_allclose(
        np.array(list(zip(steps[good], values[good], strict=True))).reshape(-1, 2),
        np.array(held_out_losses(expected)).reshape(-1, 2),
        rtol=1e-12,  # one weighted mean, the same code
    )


CURVES = st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), min_size=1, max_size=200)


@settings(deadline=None)
@given(ys=CURVES, points=st.integers(2, 60))
def test_no_extreme_value_is_lost(ys, points):
    """Each point has the mean, lowest and highest of its stretch; the plain loop is the reference."""
    x, y = np.arange(len(ys), dtype=np.float64), np.array(ys)
    stretch = stretch_for(len(ys), points)
    drawn = downsample(x, y, stretch)
    assert len(drawn.x) <= points
    assert drawn.not_finite == sum(math.isnan(value) for value in ys)
    assert (drawn.x[0], drawn.x[-1]) == (0.0, float(len(ys) - 1)) or len(drawn.x) == 1
    for i, start in enumerate(range(0, len(ys), stretch)):
        part = [value for value in ys[start : start + stretch] if not math.isnan(value)]
        if not part:
            assert all(math.isnan(values[i]) for values in (drawn.mean, drawn.low, drawn.high))
            continue
        assert (drawn.low[i], drawn.high[i]) == (min(part), max(part))
        assert drawn.low[i] <= drawn.mean[i] <= drawn.high[i]
        exact = math.fsum(value / len(part) for value in part)
        size = max(abs(value) for value in part)
        # Both sums round once per value.
        assert abs(drawn.mean[i] - exact) <= 2 * len(part) * 2**-52 * size


def test_a_view_has_a_neighbour_at_each_side():
    metrics = Metrics()
    for step in range(100):
        metrics.add({"step": step, "time_s": 10.0 * step, "tokens": 100 * step, "loss": float(step)})
    for x, unit in (("step", 1), ("time", 10), ("tokens", 100)):
        low, high = metrics.steps_between(x, 20.5 * unit, 30.5 * unit)
        xs, ys = metrics.curve("loss", x, low, high)
        assert ys[0] <= 20
        assert ys[-1] >= 31
        assert len(ys) == metrics.count("loss", low, high) <= 14
        assert list(xs) == [unit * y for y in ys]
    low, high = metrics.steps_between("step", 40.2, 40.4)  # between two steps: the line from one to the other
    assert list(metrics.curve("loss", "step", low, high)[1]) == [40.0, 41.0]


def test_time_of_a_run_without_clock_is_empty():
    metrics = Metrics()
    metrics.add({"step": 1, "loss": 2.0})
    assert len(metrics.curve("loss", "time")[0]) == 0
    metrics.add({"step": 2, "loss": 2.0, "time_s": float("nan")})
    assert len(metrics.curve("loss", "time", *metrics.steps_between("time", 1.0, 2.0))[0]) == 0


@given(st.floats() | st.lists(st.floats()) | st.text() | st.integers() | st.none() | st.booleans())
def test_json_has_six_figures(value):
    found = json.loads(compact_json({"value": value}))["value"]
    if not isinstance(value, float | list):
        assert found == value
        return
    pairs = zip(found, value, strict=True) if isinstance(value, list) else [(found, value)]
    for read, wanted in pairs:
        assert read is None if not math.isfinite(wanted) else math.isclose(read, wanted, rel_tol=5.1e-6)

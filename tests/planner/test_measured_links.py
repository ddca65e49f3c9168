"""Measured links: rates and latencies are those of the points, and a file that is something else is refused."""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.core.errors import ConfigError
from tilewright.planner.machine.measured_links import LinkFit, LinkPoint, MeasuredLinks, fitted

POINT = LinkPoint("all_gather", "fp32", 4096, 2048, 1e-3)
LINKS = MeasuredLinks(2, 1, "gloo", "a CPU", (POINT, LinkPoint("all_reduce", "fp8", 2**20, 2**18, 0.5)))


@given(
    st.floats(1e5, 1e12),
    st.floats(1e-7, 1e-1),
    st.lists(st.integers(1, 2**33), min_size=2, max_size=8, unique=True),
)
def test_points_of_a_link_give_its_rate_and_latency(rate, latency, sizes):
    link = LinkFit(rate, latency)
    found = fitted([(size, link.seconds(size)) for size in sizes])
    for size in sizes:
        # one part in 1e12 of the sums is lost where sizes hardly differ: then neither number shows in the points
        assert found.seconds(size) == pytest.approx(link.seconds(size), rel=1e-4)


@given(st.lists(st.tuples(st.integers(1, 2**33), st.floats(1e-7, 100)), min_size=1, max_size=8))
def test_any_points_give_a_link(points):
    found = fitted(points)
    assert 0 < found.bytes_per_s < math.inf
    assert 0 <= found.latency_s < math.inf


def test_noise_of_a_tenth_moves_a_rate_by_a_tenth():
    draw = random.Random(0)
    link = LinkFit(1e9, 1e-4)
    for _ in range(50):
        points = [(size, link.seconds(size) * draw.uniform(0.9, 1.1)) for size in (2**12, 2**18, 2**22, 2**25)]
        assert fitted(points).seconds(2**25) == pytest.approx(link.seconds(2**25), rel=0.15)


def test_a_file_comes_back(tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps(LINKS.to_json()))
    found = MeasuredLinks.read(path)
    assert found == LINKS
    assert set(found.fits()) == {("all_gather", "fp32"), ("all_reduce", "fp8")}
    assert found.fit("all_gather", "fp8") is None
    assert found.fit("all_reduce", "fp8") == LinkFit(2**19, 0.0), "one point: all of it is the rate"
    assert LINKS.to_json()["links"]["all_reduce.fp8"] == {"bytes_per_s": 2**19, "latency_s": 0.0}


BAD_VALUES = [("seconds", 0), ("seconds", -1.0), ("sent_bytes", 0), ("seconds", "1"), ("format", "fp4")]


def _with(**changes):
    return json.dumps(LINKS.to_json() | changes)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "not JSON", "[" * 100_000,
        _with(tilewright_links=2), _with(points=[]), _with(ranks=1), _with(ranks="2"),
        _with(points=[{}]), _with(points=[{"operation": "shout", "format": "fp32"}]), _with(device=None), "\x00",
        *(
            _with(points=[LINKS.to_json()["points"][0] | {name: value}])
            for name, value in BAD_VALUES
        ),
        _with(points=[LINKS.to_json()["points"][0] | {"seconds": math.nan}]),
        _with(points=[LINKS.to_json()["points"][0] | {"seconds": math.inf}]),
    ],
)  # fmt: skip
def test_another_file_is_refused(text, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="has no measured links") as caught:
        MeasuredLinks.read(path)
    assert "bench comm --out" in str(caught.value)


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigError, match="has no measured links"):
            MeasuredLinks.read(path)

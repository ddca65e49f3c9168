"""Tables of torch's schedules, made once for all tests of a file that asks for them."""

import pytest

from tests.planner.simulate.here import tables_here
from tilewright.parallel.pipeline.stage_split import Pipeline

SMALL = [(p, p * times) for p in (2, 3, 8) for times in (1, 2, 4)]
LARGE = [(p, p * times) for p in (3, 8, 32) for times in (1, 2, 8)]
"""Ranks of a row, and micro-batches."""


def pipelines(p: int) -> list[Pipeline]:
    return [
        Pipeline(p, "gpipe"),
        Pipeline(p, "1f1b"),
        Pipeline(p, "interleaved", 2),
        Pipeline(p, "interleaved", 4),
        Pipeline(p, "interleaved_zero_bubble", 1),
        Pipeline(p, "interleaved_zero_bubble", 2),
        Pipeline(p, "interleaved_deferred", 2),
        Pipeline(p, "zbv", 2),
    ]


@pytest.fixture(scope="session")
def tables():
    asked = [(one, m) for p, m in SMALL for one in pipelines(p)]
    asked += [(Pipeline(p, "dualpipe_v", 2), 4 * p) for p in (2, 8)]
    asked += [(one, 256) for one in (*pipelines(32)[:3], pipelines(32)[4])]
    return tables_here(asked)


@pytest.fixture(scope="session")
def large_tables():
    return tables_here([(one, m) for p, m in LARGE for one in pipelines(p)])

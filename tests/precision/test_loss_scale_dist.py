"""Ranks agree on an overflow that one of them saw. Shards of parameters: tests/optim/test_sharded_loop.py."""

import sys

import pytest

from tests.optim.shard_loops import one_rank_overflows
from tests.ranks import on_ranks


@pytest.mark.dist
@pytest.mark.skipif(sys.platform == "win32", reason="gloo with a file store")
@pytest.mark.support("clip", "copies")
def test_two_ranks_decide_alike():
    first, second = on_ranks(2, one_rank_overflows)
    assert first == second
    assert first[0][:5] == [(1024.0, True), (512.0, False), (512.0, True), (1024.0, True), (512.0, False)]

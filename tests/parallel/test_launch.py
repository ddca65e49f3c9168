"""Start of the ranks, work of one that all have, facts that must be equal, errors printed once."""

import subprocess
import sys

import pytest

from tests.ranks import on_ranks
from tilewright.core import env
from tilewright.core.env import agent_store, of_ranks
from tilewright.core.errors import ConfigError, DataError
from tilewright.parallel.launch import check_equal, in_turn, launched, on_first

WAIT = """
import time
import torch
import torch.distributed as dist
from tilewright.parallel.launch import launched
with launched(dp_replicate=2, dp_shard=1, device="cpu", timeout_s=1.0) as world:
    if world.rank:
        time.sleep(6)
    dist.all_reduce(torch.zeros(1), group=world.data_group)
"""


@pytest.mark.dist
def test_a_rank_that_waits_too_long_ends(port):
    """`parallel.timeout_minutes` is what `launched` gets: a second here, against a rank that sleeps six."""
    import os

    ranks = [
        subprocess.Popen([sys.executable, "-c", WAIT], env=os.environ | one, stderr=subprocess.PIPE, text=True)
        for one in of_ranks(2, port)
    ]
    _, error = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 1
    assert "imed out" in error
    for rank in ranks:
        rank.kill()
        rank.wait()


def _first(rank):
    done = []
    with launched(dp_replicate=1, dp_shard=-1, device="cpu", timeout_s=60) as world:
        value = on_first(world, lambda: done.append(1) or {"of": rank})
        turns = in_turn(world, lambda: rank)
        try:
            on_first(world, lambda: _raise(ConfigError("No such thing", got="it", need="another", try_="that")))
        except ConfigError as error:
            told = str(error)
        try:
            in_turn(world, lambda: rank if rank != 2 else _raise(DataError("Only here", got="rank 2")))
        except DataError as error:
            alone = str(error)
    return value, done, turns, told, alone


def _raise(error):
    raise error


@pytest.mark.dist
def test_the_first_does_it_and_all_have_the_result():
    for rank, (value, done, turns, told, alone) in enumerate(on_ranks(3, _first)):
        assert value == {"of": 0}
        assert done == ([1] if rank == 0 else [])
        assert turns == rank
        assert told.startswith("No such thing\n")
        assert "rank 2" in alone


def _facts(rank):
    with launched(dp_replicate=1, dp_shard=-1, device="cpu", timeout_s=60) as world:
        check_equal(world, {"recipe": "same"})
        try:
            check_equal(world, {"recipe": "same", "version of torch": "2.0" if rank == 1 else "2.1"})
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.dist
def test_what_differs_is_named():
    first, second = on_ranks(2, _facts)
    assert first == second
    assert first.startswith("Ranks differ in their version of torch\n")
    assert "rank 0: 2.1; rank 1: 2.0" in first


def test_one_process_starts_nothing():
    import torch.distributed as dist

    with launched(dp_replicate=1, dp_shard=-1, device="cpu", timeout_s=60) as world:
        assert world.size == 1
        assert not dist.is_initialized()
        assert on_first(world, lambda: 5) == in_turn(world, lambda: 5) == 5
    with (
        pytest.raises(ConfigError, match="and 1 processes"),
        launched(dp_replicate=2, dp_shard=1, device="cpu", timeout_s=60),
    ):
        pass


def test_torchrun_s_store_is_found_where_it_is_there():
    there = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert agent_store(there) == ("host0", 29500, "0")
    assert agent_store(there | {"TORCHELASTIC_RESTART_COUNT": "2"}) == ("host0", 29500, "2")
    assert agent_store(there | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    assert agent_store({}) is None
    assert [env.ranks(one).rank for one in of_ranks(3, 29500)] == [0, 1, 2]

"""Whose fault it is that a rank cannot continue, and the end of those that wait where no connection breaks."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_heartbeat import BEATS
from tests.ranks import started
from tilewright.core.errors import EXIT_HARDWARE
from tilewright.parallel.launch import launched
from tilewright.parallel.liveness import rank_failure
from tilewright.parallel.liveness.heartbeat import Heartbeat
from tilewright.parallel.liveness.rank_failure import Blame, ending_with_others, speaks_for_others
from tilewright.parallel.mesh import MeshSizes
from tilewright.training.planning.rank_watch import RankWatch


def _hangs(rank, folder):
    """Rank 1 has failed and does not end; rank 0 is in a collective with it."""
    with (
        (folder / f"{rank}.err").open("w") as said,
        launched(MeshSizes(dp_replicate=2), device="cpu", timeout_s=100) as world,
    ):
        os.dup2(said.fileno(), 2)
        with RankWatch(folder, world).running() as watch:
            watch.heartbeat.at(4, "forward")
            if world.rank:
                watch.heartbeat.fail(RuntimeError("lost the plot"))
                time.sleep(100)  # on its way out
            dist.all_reduce(torch.zeros(1), group=world.data.handle)


@pytest.fixture
def killed(tmp_path):
    """Rank 1 was killed in step 7, forward."""
    with subprocess.Popen([sys.executable, "-c", BEATS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        yield process.pid


def test_a_killed_rank_is_seen_once_it_gives_no_beat(killed, tmp_path):
    with Heartbeat(tmp_path, 0):
        blame = Blame(tmp_path, 0)
        assert blame.look(0.0) is None
        assert blame.look(1.9) is None
        found = blame.look(2.0)
    assert (found.record.rank, found.how) == (1, "it exited without an error record")
    said = str(found.error(4))
    assert said.startswith("Rank 1 of 4 has failed in step 7, forward; the others end with it")
    assert f"process {killed} on {platform.node()}" in said
    assert "--max-restarts" in said


def test_a_broken_connection_is_proof_enough(killed, tmp_path, monkeypatch):
    """No silence is waited for."""
    for name in ("GONE_S", "BLAME_S"):
        monkeypatch.setattr(rank_failure, name, 600.0)
    began = time.monotonic()
    with Heartbeat(tmp_path, 0):
        assert Blame(tmp_path, 0).wait(RuntimeError("closed")).record.rank == 1
    assert time.monotonic() - began < 100


def test_who_follows_is_not_to_blame_and_who_failed_blames_nobody(tmp_path):
    with Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1) as second, Heartbeat(tmp_path, 2) as third:
        blames = [Blame(tmp_path, rank) for rank in range(3)]
        second.fail(ValueError("because of rank 2\nand more"), follows=True)
        assert blames[0].look(0.0) is None
        third.fail(ValueError("of its own"))
        assert [blame.look(0.0) and blame.look(0.0).record.rank for blame in blames] == [2, None, None]
        assert blames[0].look(0.0).how == "ValueError: of its own"
        third.fail(ValueError("later"))
        assert blames[0].look(0.0).how == "ValueError: of its own"


def test_a_rank_that_came_to_its_end_is_not_to_blame(tmp_path):
    with Heartbeat(tmp_path, 0):
        Heartbeat(tmp_path, 1).close()
        assert Blame(tmp_path, 0).look(100.0) is None


@pytest.mark.parametrize("beats", [0.1, 100.0])
def test_a_silent_rank_is_taken_for_it_in_the_end(beats, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_failure, "BLAME_S", 1.5)  # on a busy machine a beat is late by a second
    with Heartbeat(tmp_path, 0), Heartbeat(tmp_path, 1, beat_s=beats):
        found = Blame(tmp_path, 0).wait(RuntimeError("timed out\nsomewhere"))
    if beats == 0.1:
        assert found is None
    else:
        assert (found.record.rank, found.how) == (1, "it gives no sign of life, and here: timed out")


def test_who_waits_is_ended_later_than_who_ends_by_itself(tmp_path):
    ends, done = [], threading.Event()
    with Heartbeat(tmp_path, 0) as first, Heartbeat(tmp_path, 1) as second:

        def end(found):
            ends.append((found.record.rank, time.monotonic()))
            first.fail(RuntimeError("follows"), follows=True)
            done.set()

        with ending_with_others(Blame(tmp_path, 0), end, every_s=0.05, forced_s=0.5):
            time.sleep(0.2)
            assert not ends
            began = time.monotonic()
            second.fail(RuntimeError("of its own"))
            assert done.wait(60)
            time.sleep(0.2)
    ((rank, at),) = ends
    assert rank == 1
    assert at - began >= 0.5


@pytest.mark.dist
def test_a_rank_in_a_collective_that_does_not_end_is_ended(tmp_path):
    with started(2, _hangs, tmp_path, group=False) as (ranks, _):
        ranks[0].join(60)
        assert ranks[0].exitcode == EXIT_HARDWARE
        said = (tmp_path / "0.err").read_text()
        assert "Rank 1 of 2 has failed in step 4, forward" in said
        assert "RuntimeError: lost the plot" in said
        assert ranks[1].is_alive()


def test_one_rank_speaks():
    assert [speaks_for_others(rank, 2) for rank in range(4)] == [True, False, False, False]
    assert [speaks_for_others(rank, 0) for rank in range(4)] == [False, True, False, False]

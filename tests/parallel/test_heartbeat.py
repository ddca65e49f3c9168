"""Signs of life: who is silent, who is behind, and what a killed process leaves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tilewright.parallel.liveness.heartbeat import Heartbeat, RankRecord, Watch, records, take_lost, watching

BEATS = """
import sys, time
from pathlib import Path
from tilewright.parallel.liveness.heartbeat import Heartbeat
beat = Heartbeat(Path(sys.argv[1]), 1, beat_s=0.05)
beat.at(7, "forward")
print("there", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Rank 1, in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", BEATS, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


def wait_for(lines, text, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any(text in line for line in lines):
            return
        time.sleep(0.02)
    raise AssertionError(f"{text!r} is not in {lines}")


@pytest.mark.support("stopped", "copies", "shards", "hsdp")
def test_a_process_that_is_stopped_is_named_and_so_is_that_it_goes_on(other, tmp_path):
    lines = []
    with Heartbeat(tmp_path, 0, beat_s=0.05), watching(Watch(tmp_path, 2, 0, silent_s=1.5), lines.append, 0.05):
        os.kill(other.pid, signal.SIGSTOP)
        wait_for(lines, f"last seen in step 7, forward (process {other.pid}")
        assert lines[0].startswith("rank 1 has given no sign of life for")
        os.kill(other.pid, signal.SIGCONT)
        wait_for(lines, "rank 1 resumed, in step 7, forward")
    assert len(lines) == 2


def test_a_killed_process_leaves_its_step_and_phase(other, tmp_path):
    with Heartbeat(tmp_path, 0) as beat:
        beat.at(7, "backward")
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert records(tmp_path)[0].end == "ended"
    (lost,) = take_lost(tmp_path)
    assert (lost.rank, lost.step, lost.phase, lost.pid) == (1, 7, "forward", other.pid)
    assert take_lost(tmp_path) == ()


def test_how_it_failed_is_in_the_record(tmp_path):
    with pytest.raises(RuntimeError), Heartbeat(tmp_path, 3):
        raise RuntimeError("out of luck\nand more")
    assert records(tmp_path)[3].end == "RuntimeError: out of luck"
    assert take_lost(tmp_path) == ()


class Folder:
    """Records of several ranks as a test wants them."""

    def __init__(self, path, world, watcher=0):
        self.beats = [Heartbeat(path, rank, beat_s=1000.0) for rank in range(world)]
        self.watch = Watch(path, world, watcher, silent_s=10, lag_s=20)

    def live(self, *ranks):
        for rank in ranks:
            self.beats[rank]._beat()

    def close(self):
        for beat in self.beats:
            beat.close()


@pytest.fixture
def three(tmp_path):
    folder = Folder(tmp_path, 3)
    for beat in folder.beats:
        beat.at(5, "data")
        beat.at(5, "forward")
    yield folder
    folder.close()


def test_who_is_behind_holds_the_others_up(three):
    assert three.watch.look(0.0) == []
    three.beats[0].phase("backward")
    three.beats[2].phase("backward")
    for now in range(1, 20):
        three.live(0, 1, 2)
        assert three.watch.look(float(now)) == []
    three.live(0, 1, 2)
    (line,) = three.watch.look(20.0)
    assert line.startswith("rank 1 is the straggler: 20 s in step 5, forward, others are in step 5, backward")
    assert three.watch.look(21.0) == []
    three.beats[1].phase("backward")
    assert three.watch.look(22.0) == ["rank 1 resumed, in step 5, backward"]


def test_all_in_one_phase_is_nobody_s_fault(three):
    for now in range(0, 200, 5):
        three.live(0, 1, 2)
        assert three.watch.look(float(now)) == []


def test_the_second_rank_speaks_where_the_first_is_silent(tmp_path):
    """And only there: of ranks 1 and 2, rank 1 says that rank 0 is silent."""
    folder = Folder(tmp_path, 3)
    watches = [Watch(tmp_path, 3, rank, silent_s=10) for rank in (1, 2)]
    for now in (0.0, 5.0, 9.0):
        folder.live(1, 2)
        assert [watch.look(now) for watch in watches] == [[], []]
    folder.live(1, 2)
    second, third = (watch.look(10.0) for watch in watches)
    assert [line[:40] for line in second] == ["rank 0 has given no sign of life for 10 s"[:40]]
    assert third == []
    folder.close()


def test_a_record_that_is_being_written_is_left_out(tmp_path):
    beat = Heartbeat(tmp_path, 0)
    (tmp_path / "ranks" / "00001.json").write_text('{"rank": 1, "ho')
    assert set(records(tmp_path)) == {0}
    assert isinstance(records(tmp_path)[0], RankRecord)
    beat.close()

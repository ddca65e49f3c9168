"""Kills, full disks and files that change: the build goes on where it was, and gives the same bytes.

Files that kill the process that reads them: `test_killed_readers`.
"""

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.data.build.corpora import build, digest, settings, write_corpus
from tilewright.core import env
from tilewright.core.errors import DataError, HardwareError
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.engine.record_tables import rows
from tilewright.data.engine.unit_folders import RECEIPT
from tilewright.data.stages.all_stages import stage_named
from tilewright.data.stages.read_records import READ

ROOT = Path(__file__).resolve().parents[3]


def start(source: Path, out: Path, processes: int, sections: str = "", executor: str = "local") -> subprocess.Popen:
    """A build in a process of its own, in its own group so that a kill can take its workers too. 0 `processes` are
    those of a cluster."""
    toml = out.with_name("data.toml")
    toml.write_text(f'[read]\nsource = "{source}"\nshard_bytes = 65536\n[tokenizer]\nvocab_size = 400\n{sections}')
    command = [sys.executable, "-m", "tilewright", "data", "build", str(toml), "--out", str(out)]
    command += ["--executor", executor] + (["--processes", str(processes)] if processes else [])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env.importing(ROOT / "src"), start_new_session=True, **quiet)


def kill_and_finish(tmp_path: Path, processes: int, kills: int, seed: int) -> None:
    source = write_corpus(tmp_path / "in")
    build(settings(source), tmp_path / "whole")
    kill_until_whole(source, tmp_path, processes, kills, seed)


def finished(out: Path) -> set[Path]:
    """Receipts of finished units. Folders of unfinished ones are not entered: they vanish while a build runs."""
    return set(out.glob(f"work/*/?????/{RECEIPT}"))


def kill_until_whole(
    source: Path, tmp_path: Path, processes: int, kills: int, seed: int, sections: str = "", executor: str = "local"
) -> None:
    """Kill a build again and again, finish it, and compare it with the one in `tmp_path`/whole."""
    rng, out = random.Random(seed), tmp_path / "killed" / "out"
    out.parent.mkdir()
    delays = []
    for _ in range(kills):
        child = start(source, out, processes, sections, executor)
        receipts = {}
        deadline = time.monotonic() + 60
        known = finished(out)
        wait_for = len(known) + rng.randint(0, 12)
        while child.poll() is None and len(finished(out)) < wait_for and time.monotonic() < deadline:
            time.sleep(0.002)
        delays.append(rng.random() * 0.02)
        time.sleep(delays[-1])
        receipts = {p: p.stat().st_mtime_ns for p in finished(out)}
        ended = child.poll() is not None  # the whole build was quicker than the draw
        if not ended and rng.random() < 0.5:
            os.killpg(child.pid, signal.SIGKILL)  # all processes
        elif not ended:
            child.kill()  # the first one alone: its workers find out
        _, errors = child.communicate()
        assert child.returncode in (-signal.SIGKILL, 0), errors.decode()
        time.sleep(0.3)
        again = {p: p.stat().st_mtime_ns for p in receipts if p.exists()}
        assert all(again[p] == receipts[p] for p in again)
    child = start(source, out, processes, sections, executor)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors.decode()
    made = {p: p.stat().st_mtime_ns for p in out.rglob(RECEIPT)}
    assert all(made[p] == t for p, t in receipts.items()), "a finished unit ran again"
    assert digest(out) == digest(tmp_path / "whole")
    assert not list(out.rglob("*.part-*"))


@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_builds_give_the_same_bytes(tmp_path, processes):
    kill_and_finish(tmp_path, processes, kills=3, seed=processes)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_many_killed_builds_give_the_same_bytes(tmp_path, processes):
    kill_and_finish(tmp_path, processes, kills=17, seed=10 + processes)


@pytest.mark.parametrize("at", [0, 3, 8, 13, 17, 20])
def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path, monkeypatch, at):
    source = write_corpus(tmp_path / "in")
    build(settings(source), tmp_path / "whole")
    rename, calls = Path.rename, []

    def full(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == at + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(DataError, match="No space left on device") as caught:
            build(settings(source), tmp_path / "out")
    assert "finished units stay" in str(caught.value)
    assert len(list((tmp_path / "out").rglob(RECEIPT))) == at
    assert not list((tmp_path / "out").rglob("*.part-*"))
    counts = build(settings(source), tmp_path / "out")["units"]
    assert counts["finished before"] == at
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_a_damaged_unit_is_made_again(tmp_path):
    source = write_corpus(tmp_path / "in")
    build(settings(source), tmp_path / "out")
    before = digest(tmp_path / "out")
    torn = tmp_path / "out" / "work" / "repair" / "00000" / "records.parquet"
    torn.write_bytes(torn.read_bytes()[:100])
    assert build(settings(source), tmp_path / "out")["units"]["made"] == 1
    assert digest(tmp_path / "out") == before


def test_one_build_per_folder(tmp_path):
    import fcntl

    source = write_corpus(tmp_path / "in")
    (tmp_path / "out" / "work").mkdir(parents=True)
    with (tmp_path / "out" / "work" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="Another data build runs"):
            build(settings(source), tmp_path / "out")


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path):
    source = write_corpus(tmp_path / "in")
    target = source / "prose" / "01.txt"
    context = Context(settings(source), tmp_path / "out")
    shards = context.listing.shards
    shard = next(i for i, items in enumerate(shards) if any(item.path == str(target) for item in items))
    target.write_text("something else " * 50)  # after it was listed
    (tmp_path / "unit").mkdir()
    READ.work(context, shard)(tmp_path / "unit")
    rules = {row["path"]: row["rule"] for row in rows(tmp_path / "unit" / "rejects.parquet")}
    assert rules["prose/01.txt"] == "file changed while it was read"


class Killer(threading.Thread):
    """Kills the workers of this process as soon as they appear, `most` of them."""

    def __init__(self, most: int):
        super().__init__(daemon=True)
        self.most, self.killed, self.stop = most, 0, False

    def run(self) -> None:
        while not self.stop and self.killed < self.most:
            for child in multiprocessing.active_children()[: self.most - self.killed]:
                child.kill()
                self.killed += 1
            time.sleep(0.01)


@pytest.mark.dist
def test_a_worker_that_is_killed_is_tried_alone(tmp_path):
    source = write_corpus(tmp_path / "in")
    build(settings(source), tmp_path / "whole")
    killer = Killer(1)
    killer.start()
    with LocalExecutor(2) as executor:
        build(settings(source), tmp_path / "out", executor)
    assert killer.killed == 1
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.dist
def test_a_later_stage_whose_process_is_killed_twice_is_an_error(tmp_path):
    source = write_corpus(tmp_path / "in")
    context = Context(settings(source), tmp_path / "out")
    with LocalExecutor(1) as one:
        stage = stage_named("read")
        one.run(context, stage, [(i, stage.fingerprint(context, i)) for i in range(context.num_shards)], lambda n: None)
    killer = Killer(10**6)
    killer.start()
    stage = stage_named("repair")
    units = [(i, stage.fingerprint(context, i)) for i in range(context.num_shards)]
    try:
        with LocalExecutor(2) as two, pytest.raises(HardwareError, match="unit 0 of the stage repair"):
            two.run(context, stage, units, lambda n: None)
    finally:
        killer.stop = True
        killer.join()

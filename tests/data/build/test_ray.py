"""Ray as the executor: the same bytes, killed processes, errors of a unit, and nodes that cannot work on a build.

One Ray with two processes is started for the whole file.
"""

import os
import signal
from concurrent.futures import Future

import pytest

from tests.data.build.corpora import build, digest, settings, write_corpus
from tests.data.build.test_kill import kill_until_whole
from tilewright import __version__
from tilewright.core.errors import DataError, HardwareError
from tilewright.data.engine.build_context import Context
from tilewright.data.engine.executors.ray_executor import RayExecutor, RayPool, check_nodes, look
from tilewright.data.engine.executors.workers import make_unit, try_item
from tilewright.data.engine.record_tables import rows
from tilewright.data.engine.unit_folders import RECEIPT

pytest.importorskip("ray")
pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def executor():
    with RayExecutor("", 2) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    build(settings(corpus), out)
    return out


class DeadlyPool(RayPool):
    """Jobs that `kills` names kill the process that runs them. `kills` gets the function and its arguments."""

    def __init__(self, pool: RayPool, kills):
        super().__init__(pool.ray, pool.runtime)
        self._kills = kills

    def submit(self, work, /, *args) -> Future:
        if not self._kills(work, args):
            return super().submit(work, *args)
        return super().submit(lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.fixture
def with_kills(executor, monkeypatch):
    """Puts a `DeadlyPool` in the place of the executor's pool, for one test."""
    executor.close()
    real = executor.pool_of
    yield lambda kills: monkeypatch.setattr(executor, "pool_of", lambda num: DeadlyPool(real(num), kills))
    executor.close()


def test_the_same_bytes_and_no_unit_twice(corpus, whole, executor, tmp_path):
    first = build(settings(corpus), tmp_path, executor)["units"]
    assert digest(tmp_path) == digest(whole)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(RECEIPT)}
    assert build(settings(corpus), tmp_path, executor)["units"] == {"made": 0, "finished before": first["made"]}
    assert times == {path: path.stat().st_mtime_ns for path in tmp_path.rglob(RECEIPT)}
    assert not (tmp_path / "work" / "seen-by-all-nodes").exists()


def test_workers_forget_an_earlier_build(executor, tmp_path):
    """The processes of Ray live on; what they know of units on disk is that of one build."""
    source = write_corpus(tmp_path / "in")
    build(settings(source), tmp_path / "out", executor)
    (source / "prose" / "05.txt").write_text("other words " * 90)
    build(settings(source), tmp_path / "out", executor)
    build(settings(source), tmp_path / "fresh")
    assert digest(tmp_path / "out") == digest(tmp_path / "fresh")


def test_a_unit_whose_process_is_killed_is_tried_alone(corpus, whole, executor, tmp_path, with_kills):
    seen = []

    def kills(work, args) -> bool:
        seen.append(args[1:3])
        return args[1:3] == ("repair", 1) and seen.count(("repair", 1)) == 1

    with_kills(kills)
    build(settings(corpus), tmp_path, executor)
    assert seen.count(("repair", 1)) == 2
    assert max(seen.count(unit) for unit in seen if unit != ("repair", 1)) == 1
    assert digest(tmp_path) == digest(whole)
    assert not list(tmp_path.rglob("*.part-*"))


@pytest.mark.slow
def test_a_file_that_kills_its_process_is_set_aside(corpus, executor, tmp_path, with_kills):
    bad = Context(settings(corpus), tmp_path).listing.shards[0][0]

    def kills(work, args) -> bool:
        if work is not make_unit:
            return args[1] == bad
        return args[1:3] == ("read", 0) and bad in args[4].inputs["files"].items

    assert try_item is not make_unit
    with_kills(kills)
    refused = build(settings(corpus), tmp_path, executor)["summary"]["refused"]
    assert refused["process that read it was killed, twice"]["examples"] == bad.name
    reasons = {row["path"]: row["rule"] for row in rows(tmp_path / "work" / "read" / "00000" / "rejects.parquet")}
    assert [path for path, rule in reasons.items() if "killed" in rule] == [bad.name]


def test_the_error_of_a_unit_is_its_own(executor):
    executor.start()

    def fail() -> None:
        raise DataError("Disk is full", got="0 bytes", need="some", try_="another --out")

    error = executor.pool_of(None).submit(fail).exception(timeout=60)
    assert type(error) is DataError
    assert str(error) == str(DataError("Disk is full", got="0 bytes", need="some", try_="another --out"))


def test_nodes_that_cannot_work_on_a_build(tmp_path):
    marker = tmp_path / "seen"
    marker.write_text("token")
    good = look(str(marker), [str(tmp_path)])
    check_nodes({"a": good}, "token", tmp_path)
    cases = {
        "b: does not see": look(str(tmp_path / "none"), []),
        f"b: does not see {tmp_path / 'in'}": look(str(marker), [str(tmp_path / "in")]),
        f"b: tilewright 0.0, here {__version__}": good | {"version": "0.0"},
        "b: ModuleNotFoundError: No module named 'tilewright'": {
            "error": "ModuleNotFoundError: No module named 'tilewright'"
        },
    }
    for words, answer in cases.items():
        with pytest.raises(DataError, match="Node of the Ray cluster") as caught:
            check_nodes({"a": good, "b": answer}, "token", tmp_path)
        assert words in str(caught.value)
        assert "a: " not in str(caught.value)
    with pytest.raises(DataError, match="a cluster without processors"):
        check_nodes({}, "token", tmp_path)


def test_a_cluster_that_does_not_answer(corpus, tmp_path):
    with RayExecutor("127.0.0.1:1", 1) as nobody, pytest.raises(HardwareError, match="cannot be reached") as caught:
        build(settings(corpus), tmp_path, nobody)
    for words in ("RAY_ADDRESS", "127.0.0.1:1", "refused", "unset RAY_ADDRESS"):
        assert words in str(caught.value), words


@pytest.mark.slow
def test_killed_builds_give_the_same_bytes(corpus, whole, tmp_path):
    """Kills of the first process and of its group; each start of Ray takes seconds."""
    (tmp_path / "whole").symlink_to(whole)
    kill_until_whole(corpus, tmp_path, 2, kills=4, seed=7, executor="ray")

"""A file that kills the process that reads it is set aside, with one process, with several, and on ranks."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.data.build.corpora import build, prose, settings
from tests.data.build.scores.texts import all_three, story, write_scored_corpus
from tilewright.core import env
from tilewright.core.errors import HardwareError
from tilewright.data.engine.executors.local_executor import LocalExecutor
from tilewright.data.engine.executors.rank_executor import RankExecutor
from tilewright.data.engine.record_tables import rows

ROOT = Path(__file__).resolve().parents[3]
_SITE = """
import io, multiprocessing, os, signal, sys
real = io.open
def opened(file, *args, **kwargs):
    if {when} and str(file).endswith("{name}"):
        os.kill(os.getpid(), signal.{signal})
    return real(file, *args, **kwargs)
io.open = opened
if {at_start} and any("spawn_main" in one for one in sys.orig_argv):
    os.kill(os.getpid(), signal.{signal})
"""
_IN_WORKER = 'any("spawn_main" in one for one in sys.orig_argv)'


def deadly(folder: Path, name: str, how: str = "SIGSEGV", *, at_start: bool = False) -> str:
    """A folder whose `sitecustomize` lets a worker die as it opens a file of that name: what PYTHONPATH is then."""
    folder.mkdir()
    text = _SITE.format(when=_IN_WORKER, name=name, signal=how, at_start=at_start)
    (folder / "sitecustomize.py").write_text(text)
    return os.pathsep.join([str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])


def corpus(folder: Path) -> Path:
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text(prose(i, 4000))  # several shards of two files
    return folder


def check(out: Path, deadly_name: str) -> None:
    kept = {row["path"] for row in rows(next(iter((out / "records").glob("train*.parquet"))))}
    refused = {row["path"]: row["rule"] for file in (out / "rejects").iterdir() for row in rows(file)}
    assert refused == {deadly_name: "process that read it was killed, twice"}
    assert deadly_name not in kept


@pytest.mark.dist
@pytest.mark.parametrize("how", ["SIGSEGV", "SIGKILL"])
def test_one_process(how, tmp_path, monkeypatch):
    source = corpus(tmp_path / "in")
    monkeypatch.setenv("PYTHONPATH", deadly(tmp_path / "site", "3.txt", how))
    with LocalExecutor(1, apart=True) as executor:
        build(settings(source), tmp_path / "out", executor)
    check(tmp_path / "out", "3.txt")


@pytest.mark.dist
def test_ranks(tmp_path, monkeypatch):
    source = corpus(tmp_path / "in")
    monkeypatch.setenv("PYTHONPATH", deadly(tmp_path / "site", "3.txt"))
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            with RankExecutor(number, 2) as executor:
                build(settings(source), tmp_path / "out", executor)
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not errors, errors
    check(tmp_path / "out", "3.txt")
    assert not list((tmp_path / "out").rglob("*.part-*"))


@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_reference_of_scores_that_kills_its_reader_is_set_aside(processes, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    folder = write_scored_corpus(tmp_path / "scores")
    good = Path(all_three(folder)["quality"]["good"])
    (good / "deadly.txt").write_text(story(900))
    monkeypatch.setenv("PYTHONPATH", deadly(tmp_path / "site", "deadly.txt"))
    time.sleep(2.5)  # contents of files that are older are remembered: what kills is to read them, not to hash them
    sections = {"quality": all_three(folder)["quality"]}
    with LocalExecutor(processes, apart=True) as executor:
        content = build(settings(folder / "in", **sections), tmp_path / "out", executor)
        again = build(settings(folder / "in", **sections), tmp_path / "out", executor)
    assert content["summary"]["docs"] > 0
    assert again["fingerprint"] == content["fingerprint"]
    assert again["units"]["made"] == 0
    (good / "deadly.txt").unlink()
    monkeypatch.delenv("PYTHONPATH")
    without = build(settings(folder / "in", **sections), tmp_path / "other")
    assert without["fingerprint"] == content["fingerprint"]


@pytest.mark.dist
def test_the_command_with_one_process(tmp_path):
    source = corpus(tmp_path / "in")
    (tmp_path / "data.toml").write_text(f'read.source = "{source}"\n[tokenizer]\nvocab_size = 400\n')
    command = [sys.executable, "-m", "tilewright", "data", "build", str(tmp_path / "data.toml"), "--processes", "1"]
    environ = env.importing(ROOT / "src") | {"PYTHONPATH": deadly(tmp_path / "site", "0.txt")}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    check(tmp_path / "data", "0.txt")


@pytest.mark.dist
def test_workers_that_die_before_they_read_are_no_fault_of_a_file(tmp_path, monkeypatch):
    source = corpus(tmp_path / "in")
    monkeypatch.setenv("PYTHONPATH", deadly(tmp_path / "site", "none", "SIGKILL", at_start=True))
    with LocalExecutor(1, apart=True) as executor, pytest.raises(HardwareError, match="cannot start"):
        build(settings(source), tmp_path / "out", executor)
    assert not list((tmp_path / "out" / "work").rglob("receipt.json"))
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    with LocalExecutor(1, apart=True) as executor:
        assert build(settings(source), tmp_path / "out", executor)["summary"]["refused"] == {}

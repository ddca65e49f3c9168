"""A consumer that dies, hangs, eats memory or answers nonsense is a row with the reason, and leaves no process."""

import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tilewright.compress.prove.consumer_process import ConsumerLimits
from tilewright.compress.prove.held_out import ReferenceAnswer
from tilewright.compress.prove.proof import Proof
from tilewright.compress.prove.question import Question

BAD = "tests.compress.consumers.bad"
MIB = 2**20
UNIFORM = np.full((3, 7), np.log(1 / 7))


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def proof(folder, seconds=30.0, memory=400 * MIB):
    question = Question([np.array([1, 2, 3])], np.array([[0, 0], [0, 1], [0, 2]]), np.arange(40), ["text"])
    expected = ReferenceAnswer(("only",), np.zeros(3, np.int64), np.zeros(3, np.int64), UNIFORM)
    return Proof(folder, question, expected, 1, ConsumerLimits(seconds, memory))


def row(folder, how, options=None, **limits):
    return proof(folder, **limits).of(BAD, folder / "no artefact", {"how": how, **(options or {})})


@pytest.mark.parametrize(
    ("how", "limits", "reason"),
    [
        ("crash", {}, "killed by SIGSEGV (signal 11); about to crash"),
        ("eat", {"memory": 300 * MIB}, "the limit is 300 MiB; about to eat"),
        ("raise", {}, "ValueError: no such operator: Frobnicate"),
        ("leave", {}, "ended without an answer"),
        ("nan", {}, "its logits are not finite"),
    ],
)
def test_a_consumer_that_fails_is_a_row_with_its_last_lines(tmp_path, how, limits, reason):
    found = row(tmp_path, how, **limits)
    assert found["state"] == "failed"
    assert reason in found["reason"]


def test_one_that_hangs_is_ended_with_the_processes_that_it_started(tmp_path):
    note = tmp_path / "pids"
    found = row(tmp_path, "hang", {"note": str(note)}, seconds=3.0)
    assert found["state"] == "failed"
    assert "no answer within 3" in found["reason"]
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_an_answer_of_another_shape_is_a_failure_in_words(tmp_path):
    found = row(tmp_path, "answer", {"vocab": 9})
    assert (found["state"], found["reason"]) == ("failed", "answered [3, 9] numbers, [3, 7] were asked for")


def test_a_sound_consumer_is_measured(tmp_path):
    found = row(tmp_path, "answer")
    assert found["state"] == "ran"
    assert found["kl"] == pytest.approx(0, abs=1e-15)
    assert (found["runtime"], found["prefill_s"], found["cached_token_s"]) == (
        "bad 1.0",
        {"32": 0.001, "40": 0.001},
        None,
    )
    assert found["loss"]["only"]["consumer"] == pytest.approx(np.log(7), rel=1e-12)
    assert 5 * MIB < found["peak_bytes"] < 400 * MIB
    assert list(tmp_path.glob("*/answer.json")) == []

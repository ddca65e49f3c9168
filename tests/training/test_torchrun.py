"""Through torchrun: four ranks of which one is killed, then two on the same folder, then one process."""

import subprocess
import sys

import pytest
import torch

from tests.training.job_of_ranks import SETTINGS, Job, kill_one
from tests.training.tiny import last_state, rows
from tilewright.report.page import write_report

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SAVES = {"checkpoint.interval": "5", "checkpoint.interval_minutes": "0", "log.report": "true"}


@pytest.mark.support("kill", "shards")
@pytest.mark.support("resume", "shards")
def test_four_ranks_survive_a_kill_and_two_and_one_go_on(tmp_path):
    runs = tmp_path / "runs"
    job = Job(runs, 4, restarts=1, **SAVES | {"train.steps": "40"})
    job.wait_for_step(15)
    row = kill_one(job, 2)
    print(row)
    job.finish()
    assert row["named"]
    assert row["recovery_s"] is not None
    folder = job.run
    said = job.said.read_text()
    assert "Rank 2 of 4 has failed in step" in said
    assert "it exited without an error record" in said
    (done,) = [event for event in rows(folder / "events.jsonl") if event["kind"] == "done"]
    assert 0 < done["goodput"] < 1
    page = write_report(folder).read_text()
    for text in ("4 processes, goodput", "Memory measured"):
        assert text in page
    Job(runs, 2, **SAVES | {"train.steps": "50"}).finish()
    assert "2 processes, goodput" in write_report(folder).read_text()
    settings = SETTINGS | SAVES | {"train.steps": "60", "run.dir": str(runs), "data.cache_dir": str(tmp_path / "cache")}
    options = [f"--{name}={value}" for name, value in settings.items()]
    subprocess.run([sys.executable, "-m", "tilewright", "train", "zero_cpu", *options], check=True)
    events, metrics = rows(folder / "events.jsonl"), rows(folder / "metrics.jsonl")
    assert [event["kind"] for event in events].count("resume") == 3
    assert [row["step"] for row in metrics if "loss" in row] == list(range(1, 61))
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.support("kill", "stages")
def test_a_stage_that_is_killed_changes_no_weight(tmp_path):
    """The second of two stages, between checkpoints: all begin again, and end where an undisturbed run does."""
    _same_after_a_kill(tmp_path, {"parallel.pp": "2", "model.tie_embeddings": "false"})


@pytest.mark.support("kill", "experts_spread")
def test_a_rank_of_experts_that_is_killed_changes_no_weight(tmp_path):
    _same_after_a_kill(tmp_path, {"parallel.ep": "2", "model.num_experts": "4", "model.expert_dim": "64"})


@pytest.mark.support("kill", "tensor")
def test_a_rank_of_cut_matrices_that_is_killed_changes_no_weight(tmp_path):
    _same_after_a_kill(tmp_path, {"parallel.tp": "2", "optim.moments": "fp32"})


def _same_after_a_kill(tmp_path, changes):
    settings = SAVES | {"train.steps": "24"} | changes
    whole = Job(tmp_path / "whole", 2, **settings)
    whole.finish()
    job = Job(tmp_path / "killed", 2, restarts=1, **settings)
    job.wait_for_step(8)
    row = kill_one(job, 1)
    job.finish()
    assert row["named"]
    tensors, expected = last_state(job.run)[0], last_state(whole.run)[0]
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name

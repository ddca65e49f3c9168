"""The recipe `mixing_cpu` on a throttled address in memory, killed twice: it ends as an undisturbed run does."""

import signal
import time
from pathlib import Path

import pytest

from tests.contracts.observe import fixed_ceilings
from tests.data.remote.conftest import publish
from tests.data.remote.servers import serve
from tests.ranks import fork_server
from tests.training.tiny import assert_same_run, rows
from tilewright.core.config.load import load_recipe
from tilewright.planner.machine import ceilings
from tilewright.training.session import train

SMALL = {
    "run.name": "tiny", "run.threads": "1", "run.device": "cpu", "model.dim": "32", "model.num_layers": "1",
    "model.num_heads": "2", "data.seq_len": "32", "train.steps": "48", "train.global_batch_size": "64",
    "train.micro_batch_size": "32", "train.compile": "off", "train.eval_interval": "0", "train.sample_tokens": "0",
    "train.log_interval": "4", "checkpoint.interval": "5", "data.mixing.interval": "4", "data.mixing.max_epochs": "0",
    "data.streaming.window": "2", "data.streaming.cache_bytes": "40000", "data.streaming.backoff_s": "0.01",
    "energy.idle_seconds": "0", "ops.cross_entropy": "ref", "ops.adam": "ref",
}  # fmt: skip


def run(folder, dataset):
    """In a process of its own: begin, or continue."""
    ceilings.measure = fixed_ceilings  # this process is the test's own
    line = {"latency_s": 0.01, "bytes_per_s": 20e6, "fail_every": 20}
    address, _ = serve("mixing", Path(dataset), in_memory=True, **line)
    given = {"run.dir": folder, "data.cache_dir": f"{folder}/cache", "data.source": address}
    train(load_recipe("mixing_cpu", SMALL | given, environ={}))


def last_step(folder):
    metrics = folder / "tiny" / "metrics.jsonl"
    return metrics.read_bytes().count(b'"loss"') if metrics.exists() else 0


@pytest.mark.slow
def test_the_recipe_killed_twice_ends_with_the_weights_of_an_undisturbed_run(tmp_path):
    dataset = publish(tmp_path / "published")
    for name, kills in (("whole", ()), ("killed", (13, 31))):
        folder = tmp_path / name
        for step in (*kills, None):
            process = fork_server().Process(target=run, args=(str(folder), str(dataset)), daemon=True)
            process.start()
            deadline = time.monotonic() + 200
            while step is not None and process.is_alive() and last_step(folder) < step:
                assert time.monotonic() < deadline, "the run makes no progress"
                time.sleep(0.005)
            if step is not None:
                process.kill()
            process.join(200)
            assert process.exitcode == (0 if step is None else -signal.SIGKILL)
    assert_same_run(tmp_path / "killed" / "tiny", tmp_path / "whole" / "tiny")
    logs = [(tmp_path / name / "tiny" / "mixture.jsonl").read_bytes() for name in ("whole", "killed")]
    assert logs[0] == logs[1]
    moves = [row for row in rows(tmp_path / "whole" / "tiny" / "mixture.jsonl") if row["kind"] == "stage"]
    assert len(moves) > 5

"""A run under torchrun of which a rank is killed hard (SIGKILL)."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.run_command import rows, train_command
from tilewright.parallel.liveness.heartbeat import RankRecord, records

PATIENCE_S = 300
SETTINGS = {
    "run.name": "job", "run.threads": "1", "run.device": "cpu", "data.max_bytes": "1MB", "data.vocab_size": "512",
    "model.dim": "64", "model.num_layers": "2", "model.num_heads": "2", "data.seq_len": "64", "train.steps": "150",
    "train.global_batch_size": "8", "train.micro_batch_size": "2", "train.log_interval": "10",
    "train.eval_interval": "0", "train.sample_tokens": "0", "checkpoint.interval": "0",
    "checkpoint.interval_minutes": "0", "log.report": "false",
}  # fmt: skip


class Job:
    """The job in a folder under torchrun, begun or continued.

    Args:
        folder: of its runs, a folder below that of the cache.
        ranks: number of processes.
        restarts: how often torchrun starts all of them again.
        recipe: shipped.
        settings: of the recipe.
    """

    def __init__(self, folder: Path, ranks: int, restarts: int = 0, recipe: str = "zero_cpu", **settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        given = SETTINGS | {"run.dir": str(folder), "data.cache_dir": str(folder.parent / "cache")} | settings
        self.run = folder / given["run.name"]
        self.said = folder / "said.txt"
        self._said = self.said.open("a")
        self.process = subprocess.Popen(
            train_command(recipe, given, ranks=ranks, restarts=restarts),
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def pids(self) -> dict[int, int]:
        """Processes by rank, of those that have begun."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                rank = child.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None and child.status() != psutil.STATUS_ZOMBIE:
                found[int(rank)] = child.pid
        return found

    def records(self) -> dict[int, RankRecord]:
        """What the ranks say of themselves."""
        return records(self.run)

    def wait_for(self, there: Callable[[], bool]) -> bool:
        """Wait until it is so; False where the job ended before.

        Raises:
            AssertionError: it never is.
        """
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            if there():
                return True
            if time.monotonic() > until:
                self.process.kill()
                raise AssertionError(f"nothing happens: {self.said.read_text()[-3000:]}")
            time.sleep(0.02)
        return False

    def wait_for_step(self, step: int) -> bool:
        """Until the first rank works on a step, counted from 1."""
        return self.wait_for(lambda: 0 in self.records() and self.records()[0].step >= step)

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            AssertionError: it failed.
        """
        code = self.process.wait()
        self._said.close()
        if code:
            raise AssertionError(f"the job ended with code {code}: {self.said.read_text()[-3000:]}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Rows of events of a kind."""
        return [row for row in rows(self.run / "events.jsonl") if row["kind"] == kind]


def kill_one(job: Job, rank: int) -> dict[str, Any]:
    """Kill a rank, and wait for the first step after it: whether the run named the rank, and seconds of recovery."""
    pids = job.pids()
    lost = job.records()[rank]
    began = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    first: list[int] = []

    def computes_again() -> bool:
        record = job.records().get(0)
        if record is None or record.pid == pids[0] or not record.step:
            return False
        first.append(record.step)
        return record.step > first[0] or bool(record.end)

    recovered = job.wait_for(computes_again)
    seconds = time.monotonic() - began
    found = [row["lost_step"] - lost.step for row in job.events("rank_lost") if row["rank"] == rank]
    named = any(further in (0, 1) for further in found)  # it may have begun another step since it was asked
    return {"named": named, "recovery_s": seconds if recovered else None}

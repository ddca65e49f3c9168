"""A run in shards of which one rank is killed hard (SIGKILL) at random moments, through torchrun: are its weights those
of an undisturbed run on as many ranks, and how long does it take until all of them compute again?

A job of some seconds with 8-bit moments and checkpoints by time. A rank drawn at random is killed at a moment drawn
uniformly from the wall time of the undisturbed job, counted from the last start or the last recovery. torchrun starts
all ranks again. Where the job ends before its kill, its last checkpoint is compared bit for bit with that of the
undisturbed one, and the next job begins. Recovery is the time from the kill to the end of the first step after it.
Then ranks are stopped (SIGSTOP): how long is it until the record names them, and are the bits the same afterwards?
How busy the machine was with other work is measured from kill to recovery; recoveries on a busy one stand apart.

Each kill, stop and job is a row of results/rank_kills_rows.jsonl as soon as it is over: started again, the benchmark
goes on.

python -m benchmarks.ranks.rank_kills --ranks 4 --kills 20 --stops 3
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS, spread, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.run_command import rows, train_command
from benchmarks.runs.kills import is_same, last_state
from tilewright.parallel.liveness.heartbeat import RankRecord, records

CLAIM = (
    "one of four ranks killed at random moments, the run ends with the bits of an undisturbed one on as many ranks, "
    "computes again within 20 s of a kill, stands still for at most 50 ms per checkpoint in the median, and names a "
    "stopped rank within 30 s"
)
ROWS = RESULTS / "rank_kills_rows.jsonl"
INTERVAL_S = 0.5
PATIENCE_S = 300
QUIET = 0.1
"""Share of the processors' time that others take, up to which a machine counts as one that does nothing else."""
SETTINGS = {
    "run.name": "job", "run.threads": "1", "run.device": "cpu", "data.max_bytes": "1MB", "data.vocab_size": "512",
    "model.dim": "64", "model.num_layers": "2", "model.num_heads": "2", "data.seq_len": "64", "train.steps": "150",
    "train.global_batch_size": "8", "train.micro_batch_size": "2", "train.log_interval": "10",
    "train.eval_interval": "0", "train.sample_tokens": "0", "checkpoint.interval": "0",
    "checkpoint.interval_minutes": str(INTERVAL_S / 60), "log.report": "false",
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
            SystemExit: it never is.
        """
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            if there():
                return True
            if time.monotonic() > until:
                self.process.kill()
                raise SystemExit(f"nothing happens: {self.said.read_text()[-3000:]}")
            time.sleep(0.02)
        return False

    def wait_for_step(self, step: int) -> bool:
        """Until the first rank works on a step, counted from 1."""
        return self.wait_for(lambda: 0 in self.records() and self.records()[0].step >= step)

    def finish(self) -> None:
        """Wait for its end.

        Raises:
            SystemExit: it failed.
        """
        code = self.process.wait()
        self._said.close()
        if code:
            raise SystemExit(f"the job ended with code {code}: {self.said.read_text()[-3000:]}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Rows of events of a kind."""
        return [row for row in rows(self.run / "events.jsonl") if row["kind"] == kind]


class Others:
    """How much of the processors' time processes other than this one and its children take."""

    def __init__(self) -> None:
        self._began, self._before = time.monotonic(), self._seconds()

    def share(self) -> float:
        """Since this object was made."""
        return (self._seconds() - self._before) / ((time.monotonic() - self._began) * (psutil.cpu_count() or 1))

    @staticmethod
    def _seconds() -> float:
        """Of all processes together, less those of this one and its children, the ended ones included."""
        busy, me = psutil.cpu_times(), psutil.Process()
        own = 0.0
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                own += sum(process.cpu_times()[:4])
        return busy.user + busy.system + getattr(busy, "irq", 0.0) + getattr(busy, "softirq", 0.0) - own


def kill_one(job: Job, rank: int) -> dict[str, Any]:
    """Kill a rank, and wait for the first step after it; a row."""
    pids, others = job.pids(), Others()
    if rank not in pids:
        return {}
    lost = job.records().get(rank)
    began = time.monotonic()
    os.kill(pids[rank], signal.SIGKILL)
    first: list[int] = []

    def computes_again() -> bool:
        record = job.records().get(0)
        if record is None or record.pid == pids.get(0) or not record.step:
            return False
        first.append(record.step)
        return record.step > first[0] or bool(record.end)

    recovered = job.wait_for(computes_again)
    seconds = time.monotonic() - began
    found = [row["lost_step"] - lost.step for row in job.events("rank_lost") if lost and row["rank"] == rank]
    named = any(further in (0, 1) for further in found)  # it may have begun another step since it was asked
    where = "before its first word" if lost is None or lost.pid != pids[rank] else lost.where
    row = {"kind": "kill", "rank": rank, "where": where, "named": named, "others_share": others.share()}
    return row | {"recovery_s": seconds if recovered else None}


def stop_one(job: Job, rank: int) -> dict[str, Any]:
    """Stop a rank until the record names it; a row."""
    pid, began = job.pids()[rank], time.monotonic()
    told = f"rank {rank} has given no sign of life"
    os.kill(pid, signal.SIGSTOP)
    job.wait_for(lambda: any(told in row["message"] for row in job.events("rank")) or told in job.said.read_text())
    seconds = time.monotonic() - began
    os.kill(pid, signal.SIGCONT)
    return {"kind": "stop", "rank": rank, "named_s": seconds}


def ended(job: Job, wanted: dict[str, Any], what: str) -> dict[str, Any]:
    """The row of a job that came to its end."""
    saves = [row["stall_s"] for row in job.events("save") if row["background"]]
    row = {"kind": "job", "what": what, "same": is_same(last_state(job.run.parent), wanted)}
    return row | {"restarts": len(job.events("resume") + job.events("restart")), "stall_s": saves}


def killed_jobs(base: Path, kept: KeptRows, args: argparse.Namespace, wanted: dict[str, Any], whole_s: float) -> None:
    """Jobs whose ranks are killed, until there are as many kills as asked for, and one job came to its end."""
    while len(kept.of(kind="kill")) < args.kills or not any(row["what"] == "killed" for row in kept.of(kind="job")):
        draw = random.Random(f"{args.seed} {len(kept.all())}")
        job = Job(base / "job", args.ranks, restarts=10_000)
        while len(kept.of(kind="kill")) < args.kills:
            try:
                job.process.wait(draw.uniform(0, whole_s))
                break
            except subprocess.TimeoutExpired:
                row = kill_one(job, draw.randrange(args.ranks))
                if row:
                    kept.add(row)
        job.finish()
        kept.add(ended(job, wanted, "killed"))
        shutil.rmtree(base / "job")


def stopped_jobs(base: Path, kept: KeptRows, args: argparse.Namespace, wanted: dict[str, Any]) -> None:
    """Jobs of which a rank is stopped for a while."""
    while len(kept.of(kind="stop")) < args.stops:
        draw = random.Random(f"{args.seed} stop {len(kept.all())}")
        job = Job(base / "job", args.ranks)
        job.wait_for_step(draw.randint(2, 50))
        kept.add(stop_one(job, draw.randrange(args.ranks)))
        job.finish()
        kept.add(ended(job, wanted, "stopped"))
        shutil.rmtree(base / "job")


def main() -> None:
    """Kill, stop, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kept = KeptRows(ROWS)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        Job(base / "prepare", args.ranks, **{"train.steps": "1"}).finish()  # the data are in the cache from here on
        began = time.perf_counter()
        straight = Job(base / "straight", args.ranks)
        straight.finish()
        whole_s = time.perf_counter() - began
        wanted = last_state(base / "straight")
        kept.add(ended(straight, wanted, "undisturbed") | {"whole_s": whole_s})
        whole_s = min(row["whole_s"] for row in kept.of(kind="job") if "whole_s" in row)  # of the least busy machine
        killed_jobs(base, kept, args, wanted, whole_s)
        stopped_jobs(base, kept, args, wanted)
    kills, jobs = kept.of(kind="kill"), [job for job in kept.of(kind="job") if job["what"] != "undisturbed"]
    recovered = [kill for kill in kills if kill["recovery_s"] is not None]
    quiet = [kill["recovery_s"] for kill in recovered if kill.get("others_share", 1.0) <= QUIET]
    busy = [kill["recovery_s"] for kill in recovered if kill.get("others_share", 1.0) > QUIET]
    stalls = [stall for job in kept.of(kind="job") for stall in job["stall_s"]]
    results = {
        "ranks": args.ranks,
        "kills": len(kills),
        "kills_named": sum(kill["named"] for kill in kills),
        "kills_before_a_first_word": sum(kill["where"] == "before its first word" for kill in kills),
        "jobs": len(jobs),
        "jobs_with_equal_bits": sum(job["same"] for job in jobs),
        "undisturbed_s": statistics.median(job["whole_s"] for job in kept.of(kind="job") if "whole_s" in job),
        "interval_s": INTERVAL_S,
        "recovery_s": spread(quiet) if quiet else None,
        "recovery_busy_s": spread(busy) if busy else None,
        "others_share": spread([kill["others_share"] for kill in recovered if "others_share" in kill]),
        "stall_s": spread(stalls),
        "stopped_named_s": spread([stop["named_s"] for stop in kept.of(kind="stop")]),
    }
    print(json.dumps(results, indent=1))
    write_result("rank_kills", CLAIM, results)


if __name__ == "__main__":
    main()

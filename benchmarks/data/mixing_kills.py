"""Runs with moving weights, from a throttled address in memory, that are killed hard (SIGKILL) again and again: are
weights, moves and samples those of an undisturbed run, bit by bit?

python -m benchmarks.data.mixing_kills --kills 20

The recipe `mixing_cpu` with a smaller model, shorter steps and the policy exp3. A process is killed after a step that
is drawn, and a drawn part of a second behind it, every fifth one while it starts; the next one continues. Where a run
ends, its last checkpoint (weights, optimizer, position, policy), its log of moves and the losses of all steps are
compared with those of the undisturbed run. Kills are kept in results/mixing_kills_runs.jsonl as they happen; the
command continues there.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write_result
from tests.machine import cache_with_rates

CLAIM = (
    "runs whose weights of domains move, killed at random steps, end with the weights of an undisturbed one, bit by bit"
)
ROWS = RESULTS / "mixing_kills_runs.jsonl"
STEPS, KILLS_OF_A_RUN = 72, 5
LINE = {"latency_s": 0.02, "bytes_per_s": 20e6, "fail_every": 50}
"""Of the address."""
SETTINGS = {
    "run.name": "job", "run.threads": "1", "run.device": "cpu", "model.dim": "64", "model.num_layers": "2",
    "model.num_heads": "2", "data.seq_len": "32", "train.steps": str(STEPS), "train.compile": "off",
    "train.eval_interval": "0", "train.sample_tokens": "0", "train.log_interval": "8", "ops.cross_entropy": "native",
    "data.mixing.policy": "exp3", "data.mixing.interval": "4", "checkpoint.interval": "6",
    "train.global_batch_size": "64", "train.micro_batch_size": "64", "data.streaming.backoff_s": "0.02",
    "data.streaming.window": "1", "data.streaming.cache_bytes": "2MB", "log.report": "false",
}  # fmt: skip


def run_job(folder: Path, dataset: Path) -> None:
    """In a process of its own: train in `folder`, or continue."""
    from tests.data.remote.servers import serve
    from tilewright.cli.app import main

    address, _ = serve("mixing", dataset, in_memory=True, **LINE)
    settings = SETTINGS | {"run.dir": str(folder), "data.cache_dir": str(folder.parent / "cache")}
    settings |= {"data.source": address}
    main(["train", "mixing_cpu", *(f"--{key}={value}" for key, value in settings.items())])


def start(folder: Path, dataset: Path) -> subprocess.Popen:
    """A process of the job, which finds rates of this machine and does not measure them: nothing here is timed."""
    command = [sys.executable, "-m", "benchmarks.data.mixing_kills", "--job", str(folder), "--dataset", str(dataset)]
    home = folder.parent / "home"
    if not home.exists():
        cache_with_rates(home)
    environ = os.environ | {"XDG_CACHE_HOME": str(home.absolute())}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)


def finish(process: subprocess.Popen) -> None:
    """Wait for a process that is not killed."""
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"the job ended with code {process.returncode}: {said.decode()}")


def rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a .jsonl file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def last_step(folder: Path) -> int:
    """That the metrics have."""
    return max((row["step"] for row in rows(folder / "job" / "metrics.jsonl")), default=0)


def outcome(folder: Path) -> dict[str, Any]:
    """What must be the same: bits of the last checkpoint, the log of moves, the loss of each step."""
    from benchmarks.runs.kills import last_state

    tensors = {name: tensor.numpy().tobytes() for name, tensor in sorted(last_state(folder).items())}
    losses = [(row["step"], row["loss"]) for row in rows(folder / "job" / "metrics.jsonl") if "loss" in row]
    return {"tensors": tensors, "moves": (folder / "job" / "mixture.jsonl").read_bytes(), "losses": losses}


def killed(folder: Path, dataset: Path, draw: random.Random, starts: bool) -> dict[str, Any] | None:
    """Kill the next process of a run; None where it ended before."""
    before = last_step(folder)
    process = start(folder, dataset)
    at = before if starts else before + draw.randint(1, 2 * STEPS // KILLS_OF_A_RUN - 1)
    while process.poll() is None and last_step(folder) < at:
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 3.0 if starts else 0.2))
    if process.poll() is not None:
        finish(process)
        return None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return {"before": before, "step": last_step(folder), "starting": starts}


def main() -> None:
    """Kill, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("mixing_kills"), help="folder of dataset and runs, kept")
    parser.add_argument("--dataset", type=Path, help="as `tilewright data build mixing_data` makes it; else made")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    dataset = args.dataset or args.work / "mixing_data"
    if args.job:
        run_job(args.job, dataset)
        return
    args.work.mkdir(parents=True, exist_ok=True)
    if not (dataset / "dataset.json").exists():
        build = [sys.executable, "-m", "tilewright", "data", "build", "mixing_data", "--out", str(dataset)]
        subprocess.run(build, check=True)
    whole, job = args.work / "whole", args.work / "job"
    if last_step(whole) < STEPS:
        finish(start(whole, dataset))
    wanted, moves = outcome(whole), rows(whole / "job" / "mixture.jsonl")
    while sum("killed" in row for row in rows(ROWS)) < args.kills or job.exists():
        past = rows(ROWS)
        kills, draw = sum("killed" in row for row in past), random.Random(len(past))
        row: dict[str, Any] = {}
        if kills < args.kills and (found := killed(job, dataset, draw, starts=kills % 5 == 4)) is not None:
            row = {"killed": found}
        else:
            if kills >= args.kills:
                finish(start(job, dataset))
            got = outcome(job)
            row = {"same": {name: got[name] == wanted[name] for name in wanted}}
            shutil.rmtree(job)
        with ROWS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    ended, kills = (
        [row["same"] for row in rows(ROWS) if "same" in row],
        [r["killed"] for r in rows(ROWS) if "killed" in r],
    )
    results = {
        "kills": len(kills),
        "kills_while_starting": sum(one["starting"] for one in kills),
        "kills_by_step": [one["step"] for one in kills],
        "runs": len(ended),
        "steps_of_a_run": STEPS,
        "moves_of_a_run": sum(row["kind"] == "stage" for row in moves) - 1,
        **{f"runs_with_equal_{name}": sum(one[name] for one in ended) for name in wanted},
    }
    write_result("mixing_kills", CLAIM, results)


if __name__ == "__main__":
    main()

"""A run that is killed hard (SIGKILL) again and again at random moments: are its weights those of an undisturbed run,
and how much work does a kill cost?

A job of some seconds with checkpoints by time. Each process is killed at a moment drawn uniformly from the wall time of
the undisturbed process, its start included, and the same command is run again. Where the job ends before its kill, its
last checkpoint is compared bit for bit with that of the undisturbed run, and the next job begins.

python -m benchmarks.runs.kills --kills 100
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import spread, write_result
from benchmarks.run_command import rows, step_rows, train_command
from tilewright.training.checkpoint.checkpoint_store import CheckpointStore, read_tensors, stored_tensors

CLAIM = (
    "killed at random moments, runs end with the bits of an undisturbed one, and lose no more work per kill than "
    "the interval, the write of a checkpoint and a step"
)
INTERVAL_S = 0.5
SETTINGS = {
    "run.name": "job", "run.threads": "1", "run.device": "cpu", "data.max_bytes": "1MB", "data.vocab_size": "512",
    "model.dim": "64", "model.num_layers": "2", "model.num_heads": "2", "data.seq_len": "64", "train.steps": "300",
    "train.global_batch_size": "4", "train.micro_batch_size": "4", "train.compile": "off", "train.log_interval": "50",
    "train.eval_interval": "0", "train.sample_tokens": "0", "checkpoint.interval_minutes": str(INTERVAL_S / 60),
    "log.report": "false",
}  # fmt: skip


def start(folder: Path) -> subprocess.Popen:
    """The job in `folder`, begun or continued."""
    settings = SETTINGS | {"run.dir": str(folder), "data.cache_dir": str(folder.parent / "cache")}
    return subprocess.Popen(train_command("default", settings), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> None:
    """Wait for a process that is not killed."""
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"the job ended with code {process.returncode}: {said.decode()}")


def last_state(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint: weights, optimizer states, generators."""
    store = CheckpointStore(folder / "job" / "checkpoints")
    path, rejected = store.newest_sound()
    store.close()
    if path is None or rejected:
        raise SystemExit(f"no valid checkpoint in {folder}, or a corrupt one: {rejected}")
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in stored_tensors(path).items()}
    read_tensors(path, tensors)
    return tensors


def is_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Equal names and bits."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name].reshape(-1).view(torch.uint8), theirs[name].reshape(-1).view(torch.uint8))
        for name in ours
    )


def lost_seconds(folder: Path) -> float:
    """Seconds of training after the newest checkpoint, which a kill has cost; 0 before the first step."""
    steps = {row["step"]: row["time_s"] for row in step_rows(folder / "job")}
    if not steps:
        return 0.0
    store = CheckpointStore(folder / "job" / "checkpoints")
    path, _ = store.newest_sound()
    store.close()
    first, last = steps[min(steps)], steps[max(steps)]
    saved = int(path.name.removeprefix("step_")) if path is not None else 0
    return max(0.0, last - steps.get(saved, first))


def main() -> None:
    """Kill, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        finish(start(base / "prepare"))  # the data are in the cache from here on
        began = time.perf_counter()
        finish(start(base / "straight"))
        whole_s = time.perf_counter() - began
        wanted, job, lost, same, resumed = last_state(base / "straight"), base / "job", [], [], 0
        while len(lost) < args.kills or job.exists():
            process = start(job)
            if len(lost) < args.kills:
                try:
                    process.communicate(timeout=draw.uniform(0, whole_s))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.communicate()
                    lost.append(lost_seconds(job))
                    continue
            finish(process)
            same.append(is_same(last_state(job), wanted))
            events = rows(job / "job" / "events.jsonl")
            resumed += sum(row["kind"] == "resume" for row in events)
            writes = [row["write_s"] for row in events if row["kind"] == "save"]
            steps = [row["step_s"] for row in step_rows(job / "job")]
            shutil.rmtree(job)
            print(f"{len(lost)} kills, {len(same)} runs, {sum(same)} with equal bits", flush=True)
        results = {
            "kills": len(lost),
            "runs": len(same),
            "runs_with_equal_bits": sum(same),
            "resumed_from_a_checkpoint": resumed,
            "undisturbed_s": whole_s,
            "interval_s": INTERVAL_S,
            "lost_s": spread(lost),
            "lost_most_s": max(lost),
            "write_s": spread(writes),
            "slowest_step_s": max(steps),
        }
    print(json.dumps(results, indent=1))
    write_result("kills", CLAIM, results)


if __name__ == "__main__":
    main()

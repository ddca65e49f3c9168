"""What a run pays besides computing: data wait, checkpoint stall, recovery after kill -9, start of the command.

Trains recipe cpu_10m, kills it hard in the middle, starts it again, and reads the run folder.

python -m benchmarks.runs.run_costs
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import parser_of, spread, write_result
from benchmarks.run_command import TRAIN_ALONE, rows, step_rows, train_command

CLAIM = (
    "data wait under 1 % of step time; checkpoint stall under 2 % of an interval; recovery from kill -9 to the next "
    "step under 15 s; command start under 0.5 s"
)
SAVE_EVERY, STEPS, KILL_AT = 20, 80, 50


def start(folder: Path) -> subprocess.Popen:
    """Recipe cpu_10m, shortened, with every step logged."""
    settings = TRAIN_ALONE | {
        "run.dir": folder, "run.name": "costs", "train.steps": STEPS, "train.log_interval": 1,
        "checkpoint.interval": SAVE_EVERY, "log.report": "true",
    }  # fmt: skip
    return subprocess.Popen(train_command("cpu_10m", settings), stdout=subprocess.DEVNULL)


def last_step(metrics: Path) -> int:
    """The newest step written down."""
    return max((row["step"] for row in rows(metrics) if "loss" in row), default=0)


def wait_for_step(process: subprocess.Popen, metrics: Path, step: int) -> None:
    """Until the run has written down `step`, or its end."""
    while last_step(metrics) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with code {process.returncode} before step {step}")
        time.sleep(0.05)


def help_seconds() -> list[float]:
    """Wall time of `tilewright --help`, as a whole process."""
    command = str(Path(sys.executable).with_name("tilewright"))
    samples = []
    for _ in range(7):
        begin = time.perf_counter()
        subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
        samples.append(time.perf_counter() - begin)
    return samples[1:]


def main() -> None:
    """Run, kill, run again, and write the result."""
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "costs"
        process = start(Path(folder))
        wait_for_step(process, run / "metrics.jsonl", KILL_AT)
        process.send_signal(signal.SIGKILL)
        process.wait()
        saved = KILL_AT // SAVE_EVERY * SAVE_EVERY
        killed = time.time()
        process = start(Path(folder))
        # The rows after the checkpoint are cut at resume, so the next step is the first row above it again.
        while last_step(run / "metrics.jsonl") > saved:
            time.sleep(0.01)
        wait_for_step(process, run / "metrics.jsonl", saved + 1)
        recovery = time.time() - killed
        if process.wait() != os.EX_OK:
            raise SystemExit(f"the resumed run ended with code {process.returncode}")
        steps = step_rows(run)
        saves = [row for row in rows(run / "events.jsonl") if row["kind"] == "save"]
    steady = [row for row in steps if row["step"] > saved + 3]
    step_s = statistics.median(row["step_s"] for row in steady)
    wait = 100 * sum(row["wait_s"] for row in steady) / sum(row["step_s"] for row in steady)
    # The stall does not depend on the interval; the share does, and is given for two.
    stalls = [100 * row["stall_s"] / (1000 * step_s) for row in saves]
    results = {
        "data_wait_percent": wait,
        "step_s": step_s,
        "checkpoint_stall_s": spread([row["stall_s"] for row in saves]),
        "checkpoint_stall_percent_of_1000_steps": spread(stalls),
        "checkpoint_stall_percent_of_20_steps": spread([stall * 1000 / SAVE_EVERY for stall in stalls]),
        "recovery_s": recovery,
        "help_s": spread(help_seconds()),
    }
    print(json.dumps(results, indent=1))
    write_result("run_costs", CLAIM, results)


if __name__ == "__main__":
    main()

"""The recipe `pipeline_cpu` on whole documents, and its baseline: idle time by cause, as the two reports show it.

The recipe trains the default model in two stages by two shards on documents of any length, balanced by measured cost,
with ZBV, FP8 and tied embeddings. The baseline is `--parallel.schedule 1f1b --parallel.balance off`. Runs of the two
take turns. Their ranks share the machine's cores: where there are fewer cores than ranks, a rank that waits leaves its
core to another one, which is done earlier for it, so step times say little, and passes that wait for a core count as
work.

    python -m benchmarks.pipelines.pipeline_documents
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import Stolen, spread, write_result
from benchmarks.run_command import rows, step_rows, train, train_command

CLAIM = "four processes train pipeline_cpu on whole documents, and less of their time is idle than with 1F1B"
CASES = {
    "zbv, balanced": (),
    "1f1b, not balanced": ("--parallel.schedule", "1f1b", "--parallel.balance", "off"),
}
RANKS, FIRST = 4, 4
"""Processes, and steps that warm up: the first one compiles."""


def run(name: str, steps: int, folder: Path) -> dict[str, Any]:
    """One run in a folder of its own; what it measured."""
    settings = {"run.dir": folder, "run.name": "run", "train.steps": steps, "train.eval_interval": 0}
    settings |= {"train.sample_tokens": 0, "train.log_interval": 1}
    command = train_command("pipeline_cpu", settings, CASES[name], ranks=RANKS)
    with Stolen() as stolen:
        train(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = json.loads((folder / "run" / "pipeline.json").read_text())
    history = [step for step in found["history"] if step["step"] > FIRST]
    trained, events = step_rows(folder / "run"), rows(folder / "run" / "events.jsonl")
    return {
        "steps": steps,
        "idle": spread([step["idle"] for step in history]),
        "causes": {
            cause: round(statistics.median(step["causes"][cause] for step in history), 4)
            for cause in history[0]["causes"]
        },
        "microbatches": [step["microbatches"] for step in history],
        "step_s": spread([row["step_s"] for row in trained if row["step"] > FIRST]),
        "losses": [row["loss"] for row in trained],
        "report_bytes": (folder / "run" / "report.html").stat().st_size,
        "balanced": sum(event["kind"] == "balance" for event in events),
        "stolen": round(stolen.share, 3),
    }


def main() -> None:
    """Run both in turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    found: dict[str, Any] = {name: [] for name in CASES}
    for turn in range(options.rounds):
        for name in CASES if turn % 2 == 0 else reversed(CASES):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(run(name, options.steps, Path(folder)))
            print(name, found[name][-1]["idle"]["median"], found[name][-1]["causes"], flush=True)
    write_result("pipeline_documents", CLAIM, found)


if __name__ == "__main__":
    main()

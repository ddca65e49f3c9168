"""Resident set of each rank over 500 steps of micro-batches whose shapes and numbers differ from step to step.

Runs of two ranks in a row, as a user starts them: log-normal documents behind each other, filled up to a few lengths,
placed by measured cost under ZBV with 8-bit matmuls, and in the stream's order under 1F1B in FP32. Each rank notes its
resident set after each step. A rank's growth is the highest one after step 50 over the highest one until then.

    python -m benchmarks.pipelines.pipeline_memory
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import RESULTS, Stolen, write_result
from tests.training.tiny import WORDS, tiny

CLAIM = "500 steps of ragged micro-batches in stages: the resident set grows by less than 2 % after step 50"
WARM, RANKS = 50, 2
CASES: dict[str, dict[str, object]] = {
    "zbv, fp8, balanced": {
        "parallel__schedule": "zbv", "parallel__balance": "on", "precision__mode": "fp8_tile",
        "model__tie_embeddings": "true",
    },
    "1f1b, fp32, as they come": {"precision__mode": "fp32"},
}  # fmt: skip
RUN: dict[str, object] = {
    "parallel__pp": RANKS, "model__dim": 32, "model__num_layers": 4, "data__rows": "documents", "data__seq_len": 96,
    "train__global_batch_size": 3, "train__micro_batch_size": 1, "train__eval_interval": 0, "train__log_interval": 50,
    "checkpoint__interval": 0, "checkpoint__interval_minutes": 0, "log__report": "false", "train__sample_tokens": 0,
    "ops__cross_entropy": "auto",
    "ops__adam": "auto",
}  # fmt: skip


def write_documents(folder: Path) -> None:
    """Documents of 3 to 94 words, most of them short."""
    draw = np.random.default_rng(11)
    (folder / "text" / "one").mkdir(parents=True)
    for number in range(2000):
        length = int(np.clip(np.exp(draw.normal(2.8, 0.8)), 3, 94))
        text = " ".join(WORDS[i] for i in draw.integers(0, len(WORDS), length))
        (folder / "text" / "one" / f"{number}.txt").write_text(f"{number} {text}.\n")


def run_rank(rank: int, case: str, data: str, folder: str, steps: int) -> dict[str, Any]:
    """A case on one rank: the resident set after each step, and what passed it."""
    from tilewright.training.hooks.base import StepHook
    from tilewright.training.session import train

    os.nice(max(0, 10 - os.nice(0)))

    class Resident(StepHook):
        """The resident set after each step."""

        def __init__(self) -> None:
            self.next_step, self.bytes, self.shapes = 1, list[int](), list[list[int]]()

        def after_step(self, step: Any, result: Any) -> None:
            self.next_step = step.number + 1
            self.bytes.append(psutil.Process().memory_info().rss)
            self.shapes.append([batch["input_ids"].shape[1] for batch in step.microbatches])

    hook, began = Resident(), time.monotonic()
    given = RUN | CASES[case] | {"train__steps": steps, "run__name": f"case{list(CASES).index(case)}"}
    train(tiny(Path(data), Path(folder), **given), hooks=[lambda *_: hook])
    return {"bytes": hook.bytes, "shapes": hook.shapes, "seconds": time.monotonic() - began}


def growth(resident: list[int]) -> dict[str, Any]:
    """Of a rank: highest resident set after the first steps over the highest one in them, and by medians."""
    before, after = resident[:WARM], resident[WARM:]
    settled, end = statistics.median(resident[WARM - 10 : WARM + 10]), statistics.median(after[-50:])
    mib = [round(size / 2**20, 1) for size in resident]
    return {
        "highest": max(after) / max(before) - 1,
        "median": end / settled - 1,
        "first_mib": mib[0],
        "step_50_mib": mib[WARM - 1],
        "last_mib": mib[-1],
        "every_50_mib": mib[WARM - 1 :: 50],
    }


def main() -> None:
    """Run both, and write the result."""
    from tests.ranks import on_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3000.0)
    parser.add_argument("--only", choices=CASES, help="one case, beside what the result has of others")
    options = parser.parse_args()
    known = RESULTS / "pipeline_memory.json"
    results: dict[str, Any] = json.loads(known.read_text())["results"] if options.only and known.exists() else {}
    with Stolen() as stolen, tempfile.TemporaryDirectory() as folder:
        write_documents(Path(folder))
        for name in (
            [options.only] if options.only else CASES
        ):  # in processes of their own: what one has freed would hide what another one takes
            given = (name, folder, folder, options.steps)
            ranks = on_ranks(RANKS, run_rank, *given, seconds=options.seconds)
            steps = ranks[0]["shapes"]
            results[name] = {
                "steps": len(steps),
                "ranks": [growth(of_rank["bytes"]) for of_rank in ranks],
                "lengths": len({length for step in steps for length in step}),
                "microbatches": sorted({len(step) for step in steps}),
                "seconds": round(ranks[0]["seconds"], 1),
            }
            print(name, json.dumps(results[name], indent=1), flush=True)
    results["stolen"] = round(stolen.share, 3)
    write_result("pipeline_memory", CLAIM, results)


if __name__ == "__main__":
    main()

"""Held-out loss after the same tokens: bf16_mixed against FP32, several seeds, by the command line a user has.

python -m benchmarks.loss_parity [--seeds 3] [--steps 150]
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import spread, write_result

CLAIM = "held-out loss of bf16_mixed within 0.5 % of FP32 after the same tokens"


def final_eval_loss(mode: str, seed: int, steps: int, folder: Path, rows: int = 8) -> float:
    """Held-out loss, token-weighted and evaluated in FP32, of the default recipe in `mode` with `rows` rows a step."""
    name = f"{mode}-{seed}"
    settings = {
        "run.dir": str(folder), "run.name": name, "run.seed": str(seed), "precision.mode": mode,
        "train.steps": str(steps), "train.batch_size": str(rows),
        "train.micro_batch": str(min(rows, 8)), "train.eval_every": "0", "train.eval_batches": "8",
        "train.sample_tokens": "0", "save.every": "0", "log.report": "false",
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in (f"--{key}", value)]
    subprocess.run([sys.executable, "-m", "tilewright", "train", *options], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    domains = [row["eval"] for row in rows if "eval" in row][-1].values()
    tokens = sum(domain["tokens"] for domain in domains)
    return math.fsum(domain["loss"] * domain["tokens"] for domain in domains) / tokens


def main() -> None:
    """Train each seed in both modes and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    losses: dict[str, list[float]] = {"fp32": [], "bf16_mixed": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for mode, found in losses.items():
                found.append(final_eval_loss(mode, seed, args.steps, Path(folder)))
                print(f"seed {seed} {mode}: {found[-1]:.4f}", flush=True)
    gaps = [100 * (low / high - 1) for low, high in zip(losses["bf16_mixed"], losses["fp32"], strict=True)]
    results = {
        "unit": "nats a token",
        "steps": args.steps,
        **{mode: spread(found) for mode, found in losses.items()},
        "gap_percent": spread(gaps),
    }
    print(f"gap: {gaps} %")
    write_result("loss_parity", CLAIM, results)


if __name__ == "__main__":
    main()

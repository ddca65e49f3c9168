"""Held-out loss of the FP8 modes beside BF16 on the default model and data: same seeds, same rows, in whole runs.

A run takes minutes, so each is kept in `results/fp8_quality_runs.jsonl` as it ends, and a later call goes on where the
last one stopped. The result is made of all runs with the same number of steps and rows.

python -m benchmarks.fp8_quality [--steps 2000] [--rows 2] [--seeds 3] [--modes bf16_mixed fp8_tile ...]
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, write_result
from benchmarks.loss_parity import final_eval_loss

CLAIM = "fp8_tile within 0.25 % of the held-out loss of bf16_mixed after 2000 steps, three seeds"
MODES = ("bf16_mixed", "fp8_tile", "fp8_hybrid", "fp8_tensorwise", "fp32")
RUNS = RESULTS / "fp8_quality_runs.jsonl"


def known_runs(steps: int, rows: int) -> dict[tuple[str, int], float]:
    """Held-out loss by mode and seed of the runs that are there."""
    if not RUNS.exists():
        return {}
    found = [json.loads(line) for line in RUNS.read_text().splitlines()]
    return {(run["mode"], run["seed"]): run["loss"] for run in found if (run["steps"], run["rows"]) == (steps, rows)}


def summary(runs: dict[tuple[str, int], float], steps: int, rows: int) -> dict[str, object]:
    """Losses by mode, gaps to BF16 seed by seed, and the spread of the seeds themselves."""
    base = {seed: loss for (mode, seed), loss in runs.items() if mode == "bf16_mixed"}
    results: dict[str, object] = {"unit": "nats a token", "steps": steps, "rows_a_step": rows}
    for mode in MODES:
        losses = {seed: loss for (name, seed), loss in sorted(runs.items()) if name == mode}
        gaps = {seed: 100 * (loss / base[seed] - 1) for seed, loss in losses.items() if seed in base}
        results[mode] = {"loss": losses, "gap_percent": gaps, "mean_gap_percent": _mean(list(gaps.values()))}
    if len(base) > 1:
        spread = statistics.stdev(base.values())
        results["seed_noise_percent"] = 100 * spread / _mean(list(base.values()))
    return results


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def main() -> None:
    """Make the runs that are missing, seed by seed, and write the result after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:4])
    args = parser.parse_args()
    runs = known_runs(args.steps, args.rows)
    for seed in range(args.seeds):
        for mode in args.modes:
            if (mode, seed) in runs:
                continue
            with tempfile.TemporaryDirectory() as folder:
                loss = final_eval_loss(mode, seed, args.steps, Path(folder), rows=args.rows)
            runs[mode, seed] = loss
            with RUNS.open("a") as file:
                file.write(
                    json.dumps({"mode": mode, "seed": seed, "steps": args.steps, "rows": args.rows, "loss": loss})
                )
                file.write("\n")
            print(f"seed {seed} {mode}: {loss:.4f}", flush=True)
            write_result("fp8_quality", CLAIM, summary(runs, args.steps, args.rows))
    print(json.dumps(summary(runs, args.steps, args.rows), indent=1))


if __name__ == "__main__":
    main()

"""Held-out loss of the precision modes, and of formats of the optimizer's states under BF16, on the default model and
data: same seeds, same rows, by the command line.

A run takes minutes, so each is kept in `results/quality_runs.jsonl` as it ends, and a later call continues where the
last one stopped. The result is made of all runs with the same number of steps and rows on the same text: which that is
depends on the packages that are installed, and runs on different texts cannot be compared.

python -m benchmarks.numerics.quality [--steps 2000] [--rows 2] [--seeds 3] [--modes bf16_mixed fp8_tile 8bit ...]
"""

import json
import math
import statistics
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, machine_kind, parser_of, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.run_command import TRAIN_ALONE, held_out_loss, train, train_command
from tilewright.core.config.load import load_recipe
from tilewright.training.assemble import prepare_data

CLAIM = (
    "bf16_mixed within 0.5 % of FP32's held-out loss, fp8_tile within 0.25 % and 8-bit optimizer states within 0.5 % "
    "of bf16_mixed's, three seeds"
)
BASE = "bf16_mixed"
MODES = (BASE, "fp8_tile", "fp8_hybrid", "fp8_tensorwise", "fp32")
STATES = {
    "8bit": {"optim.moments": "8bit"},
    "8bit_split24": {"optim.moments": "8bit", "optim.master_weights": "split24"},
    "8bit_stochastic": {"optim.moments": "8bit", "optim.master_weights": "stochastic"},
}
"""Settings that come to those of BASE, by the name that stands for them among the modes."""
RUNS = KeptRows(RESULTS / "quality_runs.jsonl")

Runs = dict[tuple[str, int], float]


def final_eval_loss(mode: str, seed: int, steps: int, folder: Path, rows: int) -> tuple[float, str]:
    """Held-out loss, token-weighted and evaluated in FP32, of recipe cpu_10m in `mode` (a name of MODES or
    STATES) with `rows` rows per step; and the fingerprint of its data."""
    name = f"{mode}-{seed}"
    # The recipe's rate is for its 16 rows. With Adam a rate goes with the root of the batch (Malladi et al., 2022); at
    # the full rate two rows learn less and runs part by several percent (docs/log.md, 2026-11-21).
    default = load_recipe("cpu_10m", {}, environ={}).recipe
    rate = default.optim.lr * math.sqrt(rows / default.train.global_batch_size)
    settings = TRAIN_ALONE | STATES.get(mode, {}) | {
        "run.dir": folder, "run.name": name, "run.seed": seed, "precision.mode": BASE if mode in STATES else mode,
        "train.steps": steps, "train.global_batch_size": rows, "train.micro_batch_size": min(rows, 8),
        "optim.lr": rate, "train.eval_batches": 8,
    }  # fmt: skip
    train(train_command("cpu_10m", settings))
    data = json.loads((folder / name / "data.json").read_text())["fingerprint"]
    return held_out_loss(folder / name), data


def known_runs(steps: int, rows: int, data: str) -> Runs:
    """Held-out loss by mode and seed of the runs that are there, on this text."""
    return {(run["mode"], run["seed"]): run["loss"] for run in RUNS.of(steps=steps, rows=rows, data=data)}


def summary(runs: Runs, steps: int, rows: int) -> dict[str, object]:
    """Losses by mode, gaps to BF16 seed by seed, and the spread of the seeds themselves.

    A gap of single runs is noise as much as effect: two runs that differ in rounding alone part ways as two seeds do.
    `standard_error_percent` says how well the mean gap is known.
    """
    base = {seed: loss for (mode, seed), loss in runs.items() if mode == BASE}
    results: dict[str, object] = {"unit": "nats a token", "steps": steps, "rows_a_step": rows}
    for mode in (*MODES, *STATES):
        losses = {seed: loss for (name, seed), loss in sorted(runs.items()) if name == mode}
        gaps = {seed: 100 * (loss / base[seed] - 1) for seed, loss in losses.items() if seed in base}
        results[mode] = {"loss": losses, "gap_percent": gaps, **_mean_and_error(list(gaps.values()))}
    if len(base) > 1:
        results["seed_noise_percent"] = 100 * statistics.stdev(base.values()) / statistics.fmean(base.values())
    return results


def _mean_and_error(gaps: list[float]) -> dict[str, float | None]:
    return {
        "mean_gap_percent": statistics.fmean(gaps) if gaps else None,
        "standard_error_percent": statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None,
    }


def main() -> None:
    """Make the runs that are missing, seed by seed, and write the result after each."""
    parser = parser_of(__doc__, steps=2000, rows=2, seeds=3)
    parser.add_argument("--modes", nargs="+", choices=(*MODES, *STATES), default=MODES)
    args = parser.parse_args()
    data = prepare_data(load_recipe("cpu_10m", {}, environ={}).recipe).fingerprint
    runs = known_runs(args.steps, args.rows, data)
    for seed in range(args.seeds):
        for mode in args.modes:
            if (mode, seed) in runs:
                continue
            with tempfile.TemporaryDirectory() as folder:
                loss, seen = final_eval_loss(mode, seed, args.steps, Path(folder), args.rows)
            if seen != data:
                raise SystemExit("the installed packages have changed meanwhile, and the text with them; start again")
            runs[mode, seed] = loss
            run = {"mode": mode, "seed": seed, "steps": args.steps, "rows": args.rows, "loss": loss, "data": data}
            RUNS.add({**run, "machine": machine_kind()})
            write_result("quality", CLAIM, summary(runs, args.steps, args.rows))
    write_result("quality", CLAIM, summary(runs, args.steps, args.rows))
    print(json.dumps(summary(runs, args.steps, args.rows), indent=1))


if __name__ == "__main__":
    main()

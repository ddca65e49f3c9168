"""A searched policy beside the ones people choose without a search, in whole runs of the default job.

Searches once, then trains each policy with each seed: all BF16, all FP8, FP8 but for the first and last block, and the
searched one. The policy and each run are kept in `results/precision_search/` as they end, and a later call continues
where the last one stopped. Speeds are those of the search (`--time`), of linear matmuls alone; losses are held out.

python -m benchmarks.numerics.precision_search [--budget 0.005%] [--rows 16] [--seeds 0 1 2] [--SECTION.FIELD VALUE]
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.common import RESULTS, machine_kind, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.run_command import TRAIN_ALONE, held_out_loss, train, train_command

CLAIM = (
    "the searched policy beats all FP8 in loss, and FP8 but for the first and last block in speed at equal loss; "
    "predicted loss change within 2x of the measured one"
)
FOLDER = RESULTS / "precision_search"
BASE, EVERYTHING, SEARCHED, ENDS = "all BF16", "all FP8", "searched", "first and last block BF16"
ALL_FP8 = '[precision]\nmode = "fp8_tile"\ndecouple = []\nfp8_min_gain = 0.0\n'
BLOCK = '[[precision.rules]]\nmatch = "model.layers.{}.*"\nop = "linear"\ncompute = "bf16"\n'


def search(args: argparse.Namespace, folder: Path) -> dict:
    """The search's own numbers; made where they are not there yet."""
    out = folder / "policy.toml"
    if not out.with_suffix(".json").exists():
        options = ["--budget", args.budget, "--time", args.time, "--out", str(out), "--rows", str(args.search_rows)]
        options += ["--batches", str(args.batches), "--warmup", str(args.warmup)]
        command = [sys.executable, "-m", "tilewright", "precision", "search", "cpu_10m", *options]
        train([*command, *args.settings, *rows_of(args)])
    return json.loads(out.with_suffix(".json").read_text())


def rows_of(args: argparse.Namespace) -> list[str]:
    """Settings of the batch."""
    return ["--train.global_batch_size", str(args.rows), "--train.micro_batch_size", str(min(args.rows, 8))]


def recipes(folder: Path, found: dict) -> dict[str, Path]:
    """A recipe file for each policy."""
    last = max(int(unit["name"].split(".layers.")[1].split(".")[0]) for unit in found["units"])
    texts = {
        BASE: '[precision]\nmode = "bf16_mixed"\n',
        EVERYTHING: ALL_FP8,
        ENDS: ALL_FP8 + BLOCK.format(0) + BLOCK.format(last),
    }
    paths = {SEARCHED: folder / "policy.toml"}
    for number, (name, text) in enumerate(texts.items()):
        paths[name] = folder / f"usual-{number}.toml"
        paths[name].write_text(f'extends = "cpu_10m"\n{text}')
    return paths


def loss_of_run(recipe: Path, seed: int, args: argparse.Namespace) -> float:
    """Token-weighted held-out loss at the end of a run, evaluated in FP32."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TRAIN_ALONE | {
            "run.dir": folder, "run.name": "run", "run.seed": seed, "train.steps": args.steps, "train.eval_batches": 8,
        }  # fmt: skip
        train(train_command(str(recipe), settings, [*args.settings, *rows_of(args)]))
        return held_out_loss(Path(folder) / "run")


def summary(found: dict, runs: list[dict]) -> dict[str, object]:
    """What the search said and what the runs gave, by policy; gaps to BF16 seed by seed."""
    said = {mark["name"]: mark for mark in found["landmarks"]} | {SEARCHED: found["chosen"]}
    base = {run["seed"]: run["loss"] for run in runs if run["policy"] == BASE}
    results: dict[str, object] = {"budget": found["budget"], "time": found["time"], "loss_slope": found["loss_slope"]}
    for name, mark in said.items():
        losses = {run["seed"]: run["loss"] for run in runs if run["policy"] == name}
        gaps = [100 * (loss / base[seed] - 1) for seed, loss in losses.items() if seed in base]
        results[name] = {
            "times_as_fast": said[BASE]["seconds"] / mark["seconds"],
            "products_in_fp8": len(mark["fp8"]),
            "predicted_percent": 100 * mark["predicted"]["change"],
            "measured_at_once_percent": 100 * mark["measured"]["change"],
            "loss": losses,
            "gap_percent": gaps,
            "mean_gap_percent": statistics.fmean(gaps) if gaps else None,
            "standard_error_percent": statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None,
        }
    return results


def main() -> None:
    """Search if need be, make the runs that are missing, and write the result after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="0.005%")
    parser.add_argument("--time", default="ideal", choices=("measured", "h200", "ideal"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--search-rows", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args, args.settings = parser.parse_known_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    found = search(args, args.folder)
    log = KeptRows(args.folder / "runs.jsonl")
    key = {"steps": args.steps, "rows": args.rows, "settings": args.settings}
    runs = log.of(**key)
    for seed in args.seeds:
        for name, recipe in recipes(args.folder, found).items():
            if any((run["policy"], run["seed"]) == (name, seed) for run in runs):
                continue
            loss = loss_of_run(recipe, seed, args)
            runs.append(log.add({"policy": name, "seed": seed, "loss": loss, **key, "machine": machine_kind()}))
    if args.folder == FOLDER:
        write_result("precision_search", CLAIM, summary(found, runs))
    print(json.dumps(summary(found, runs), indent=1))


if __name__ == "__main__":
    main()

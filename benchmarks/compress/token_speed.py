"""How much faster a model with a quarter of its FFN and heads cut is at one cached token than the whole one, in one
runtime and format: of the default shape, and of one whose time is that of its weights.

Weights are those of one step: speed does not depend on them. Each model is exported and run in its runtimes by
`export_run`, in turn for some rounds; the least time of each counts. Beside the ratio stand the bytes of weights that a
token reads: their ratio is what a runtime without a cost of its own would reach. That cost is of each runtime

    fixed = t_whole - bytes_whole (t_whole - t_cut) / (bytes_whole - bytes_cut)

Latencies mean something on a quiet machine only.

python -m benchmarks.compress.token_speed --work FOLDER [--rounds 3] [--threads 2] [--shapes default,cpu_50m]
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common import machine_kind, write_result
from benchmarks.compress.prune_stages import Study
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.measure import parameters
from tilewright.compress.budget.stages import run_stage, stage_recipe, write_model
from tilewright.compress.export.targets import find_targets
from tilewright.compress.export_run import export_run
from tilewright.compress.prove.limits import ConsumerLimits
from tilewright.compress.prune.prune import prune

CLAIM = "a model with a quarter of its FFN and heads cut answers a cached token at least 1.2x as fast as the whole one"
TARGETS = "onnx,onnx-int8,gguf-f16,gguf-q8_0,gguf-q4_0"
PLAIN = {
    "train.steps": 1, "train.global_batch_size": 2, "train.micro_batch_size": 2, "train.compile": "off",
    "train.eval_interval": 0, "train.eval_batches": 1, "train.sample_tokens": 0, "precision.mode": "fp32",
    "log.report": False, "energy.idle_seconds": 0, "data.max_bytes": 24_000_000, "data.seq_len": 256,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "default": {
        "model.dim": 256, "model.num_layers": 6, "model.num_heads": 4, "model.tie_embeddings": True,
        "data.vocab_size": 4096,
    },
    "cpu_50m": {
        "model.dim": 512, "model.num_layers": 12, "model.num_heads": 8, "model.ffn_dim": 1408,
        "data.vocab_size": 16384,
    },
}  # fmt: skip
CUT = {"ffn": 0.25, "heads": 0.25}


def times(run: Path, out: Path, threads: int) -> dict[str, dict[str, Any]]:
    """Seconds of a cached token by runtime and format, and bytes of the artefact."""
    source = open_to_export(run)
    limits = ConsumerLimits.of_this_machine(600)
    record = export_run(source, find_targets(TARGETS), out, threads=threads, limits=limits)
    rows = {row["target"]: row for row in record["artefacts"]} | {
        f"own, {row['name']}": row for row in record["baselines"]
    }
    return {
        name: {"seconds": row.get("cached_token_s"), "state": row.get("state", "ran")} for name, row in rows.items()
    }


def weights_read(model: Any) -> int:
    """Weights that a token reads: all but the rows of an embedding that is no head."""
    table = 0 if model.config.tie_embeddings else model.config.vocab_size * model.config.dim
    return parameters(model) - table


def of_shape(name: str, work: Path, rounds: int, threads: int) -> dict[str, Any]:
    """The whole model and its cut, in turn."""
    study = Study.of_settings(work / name, 1, PLAIN | SHAPES[name] | {"run.threads": threads})
    whole = study.source.model
    cut = prune(whole, CUT, importance="l1").model  # type: ignore[arg-type]
    folder = work / name / "models" / "cut"
    write_model(study.source, cut, folder)
    recipe = stage_recipe(study.source, "cut", work / name, folder=folder, taught=False, steps=1)
    runs = {"whole": study.source.run, "cut": run_stage(recipe, study.source)}
    least: dict[str, dict[str, float]] = {}
    for number in range(rounds):
        for which, run in runs.items():
            for runtime, row in times(run, work / name / f"{which}-artefacts", threads).items():
                print(number, which, runtime, row, flush=True)
                if row["seconds"]:
                    kept = least.setdefault(runtime, {})
                    kept[which] = min(kept.get(which, row["seconds"]), row["seconds"])
    read = {"whole": weights_read(whole), "cut": weights_read(cut)}
    return {
        "weights_read": read,
        "weights_ratio": read["whole"] / read["cut"],
        "head_share": whole.config.vocab_size * whole.config.dim / read["whole"],  # type: ignore[attr-defined]
        "runtimes": {runtime: kept | _compared(kept, read) for runtime, kept in least.items() if len(kept) == 2},
    }


def _compared(kept: dict[str, float], read: dict[str, int]) -> dict[str, float]:
    per_weight = (kept["whole"] - kept["cut"]) / (read["whole"] - read["cut"])
    return {"ratio": kept["whole"] / kept["cut"], "fixed_s": kept["whole"] - per_weight * read["whole"]}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default="default,cpu_50m")
    args = parser.parse_args()
    facts = {"cut": CUT, "rounds": args.rounds, "threads": args.threads}
    shapes: dict[str, Any] = {}
    for name in args.shapes.split(","):
        shapes[name] = of_shape(name, args.work, args.rounds, args.threads)
        write_result(f"token_speed_{machine_kind()}", CLAIM, facts | {"shapes": shapes})


if __name__ == "__main__":
    main()

"""A precision search where something is to be found: outliers in what the first and the last layer read.

Everything in FP8 loses by them, the habit of leaving the first and the last layer in BF16 pays for two whole layers to
be rid of them, and a search has to find the few matmuls that they hurt. Searches once, at the weights of some BF16
steps, then trains each policy from the beginning with each seed. Losses are held out, in the formats of training.
Speeds are those of the search with quantisation taken as free (`--time ideal`), of linear matmuls alone. Runs are kept
in `results/search_planted/` as they end, and a later call continues where the last one stopped.

python -m benchmarks.numerics.search_planted [--steps 400] [--seeds 0 1 2] [--budget 0.04%]
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, write_result
from benchmarks.kept_rows import KeptRows
from benchmarks.numerics.dpaa import SHAPE
from benchmarks.numerics.outliers import plant_before_attention, plant_before_mlp
from benchmarks.numerics.precision_search import recipes, summary
from tilewright.cli.precision_output import intro_of, policy_text
from tilewright.core.config.load import Loaded, load_recipe
from tilewright.models.decoder.decoder import Decoder
from tilewright.training.assemble import build, prepare_data, set_up
from tilewright.training.executor.evaluate import evaluate, pooled
from tilewright.training.precision_search import SearchSettings, search

CLAIM = (
    "the searched policy beats all FP8 in loss, and FP8 but for the first and last layer in speed at equal loss; "
    "predicted loss change within 2x of the measured one; three seeds"
)
FOLDER = RESULTS / "search_planted"
MODEL = SHAPE | {"model.num_layers": "3", "train.eval_batches": "8"}
WARMUP = 60


def plant(model: Decoder) -> None:
    """Where the habit looks: in the first and in the last layer."""
    for block in (model.blocks[0], model.blocks[-1]):
        plant_before_attention(block)
        plant_before_mlp(block)


def planted_weights(model: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Outliers, and the weights of some BF16 steps with them."""
    recipe = {"precision.mode": "bf16_mixed", "train.steps": str(WARMUP)}
    parts = build(set_up(load_recipe("cpu_10m", MODEL | recipe, environ={})), fresh=True)
    plant(parts.model)
    losses = [parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(i)).loss for i in range(WARMUP)]
    parts.stream.close()
    plant(model)
    model.load_state_dict(parts.model.state_dict())
    return [float(i + 1) for i in range(WARMUP)], losses


def searched(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The search's numbers; made where they are not there yet."""
    out = folder / "policy.toml"
    if not out.with_suffix(".json").exists():
        loaded = load_recipe("cpu_10m", MODEL, environ={})
        budget = float(args.budget.rstrip("%")) / 100
        found = search(loaded, SearchSettings(budget, batches=args.batches, time="ideal"), planted_weights)
        weights = f"{WARMUP} BF16 steps with planted outliers"
        out.write_text(policy_text(found, loaded, out, intro_of(found, "cpu_10m", args.budget, weights)))
        out.with_suffix(".json").write_text(json.dumps({"budget": budget, **found.to_json()}, indent=1))
    return json.loads(out.with_suffix(".json").read_text())


def loaded_policy(recipe: Path, seed: int, steps: int) -> Loaded:
    """A policy's recipe for the small model."""
    return load_recipe(str(recipe), MODEL | {"run.seed": str(seed), "train.steps": str(steps)}, environ={})


def held_out_loss(recipe: Path, seed: int, steps: int) -> float:
    """Loss at the end of a run."""
    parts = build(set_up(loaded_policy(recipe, seed, steps)), fresh=True)
    plant(parts.model)
    parts.modes.weights.refresh()
    for step in range(steps):
        parts.executor.step(parts.stream.next_step(), parts.schedule.lr_at(step))
    whole = pooled(evaluate(parts.model, parts.held_out.batches, fp32=False))
    parts.stream.close()
    return whole.loss if whole is not None else math.nan


def main() -> None:
    """Search if need be, make the runs that are missing, and write the result after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="0.04%")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    found = searched(args, args.folder)
    data = prepare_data(load_recipe("cpu_10m", MODEL, environ={}).recipe).fingerprint
    log = KeptRows(args.folder / "runs.jsonl")
    runs = log.of(steps=args.steps, data=data)
    for seed in args.seeds:
        for name, recipe in recipes(args.folder, found).items():
            if any((run["policy"], run["seed"]) == (name, seed) for run in runs):
                continue
            loss = held_out_loss(recipe, seed, args.steps)
            runs.append(log.add({"policy": name, "seed": seed, "steps": args.steps, "data": data, "loss": loss}))
    results = summary(found, runs)
    if args.folder == FOLDER:
        write_result("search_planted", CLAIM, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

"""What each importance leaves of a small model: FFN channels cut by a quarter, before and after recovery, beside the
teacher that got the same further steps.

Rises are of the held-out loss in FP32 over the teacher, relative, on the same rows, with the standard error of their
differences. One seed each: differences of a few errors say nothing.

python -m benchmarks.prune_importance [--teacher-steps 300] [--steps 80] [--seeds 1]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.measure import row_losses_of
from tilewright.compress.budget.stages import run_stage, stage_recipe, write_model
from tilewright.compress.export.codes import calibration
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.scores import METHODS
from tilewright.core.config.load import load_recipe
from tilewright.training.components.dataset import held_out
from tilewright.training.session import train

CLAIM = "which importance is best before recovery, and after it, for a quarter of the FFN channels of a small model"
SHARE = 0.25
SHAPE = {
    "model.dim": 64, "model.num_layers": 4, "model.num_heads": 4, "model.ffn_dim": 256, "data.vocab_size": 2048,
    "data.max_bytes": 3_000_000, "data.seq_len": 64, "train.global_batch_size": 8, "train.micro_batch_size": 8,
    "train.compile": "off", "train.eval_interval": 0, "train.eval_batches": 12, "train.sample_tokens": 0,
    "precision.mode": "fp32", "optim.lr": 3e-3, "log.report": False, "energy.idle_seconds": 0,
}  # fmt: skip


def of_seed(seed: int, teacher_steps: int, steps: int, folder: Path) -> dict[str, Any]:
    """Rises of each importance, and of the control."""
    settings = {**SHAPE, "run.dir": folder, "run.name": "teacher", "run.seed": seed, "train.steps": teacher_steps}
    run = train(load_recipe(None, {name: str(value) for name, value in settings.items()}, environ={})).run_dir
    assert run is not None
    source = open_to_export(run)
    batches = held_out(source.recipe, source.data).batches
    whole = row_losses_of(source.model, batches)
    found: dict[str, Any] = {"loss": whole.loss, "rows": sum(len(counts) for _, counts in whole.domains.values())}
    write_model(source, source.model, folder / "whole")
    stage = run_stage(
        stage_recipe(source, "control", folder, folder=folder / "whole", taught=False, steps=steps), source
    )
    found["teacher, as many steps more"] = {
        "after": row_losses_of(open_to_export(stage).model, batches).rise_over(whole)
    }
    for method in METHODS:
        seen = calibration(source.recipe, source.data)[:8]
        made = prune(source.model, {"ffn": SHARE}, importance=method, batches=seen, seed=seed)
        write_model(source, made.model, folder / method)
        recipe = stage_recipe(source, f"after-{method}", folder, folder=folder / method, taught=True, steps=steps)
        after = row_losses_of(open_to_export(run_stage(recipe, source)).model, batches)
        before = row_losses_of(made.model, batches).rise_over(whole)
        found[method] = {"before": before, "after": after.rise_over(whole)}
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    seeds = {}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            seeds[str(seed)] = of_seed(seed, args.teacher_steps, args.steps, Path(name))
            print(seed, seeds[str(seed)], flush=True)
    facts = {"share": SHARE, "teacher_steps": args.teacher_steps, "steps": args.steps}
    write_result("prune_importance", CLAIM, facts | {"shape": {k: str(v) for k, v in SHAPE.items()}, "seeds": seeds})


if __name__ == "__main__":
    main()

"""What FFN channels cut by a quarter and by half cost a run, before recovery and after it, with distillation and
without, beside the run that got the same further steps.

Rises are of the held-out loss in FP32, relative, on the same rows, with the standard error of their differences: over
the run as it is, and over the run with as many more steps. One seed. The file is written after each stage.

python -m benchmarks.prune_recovery --run RUN [--steps 200] --work FOLDER
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.measure import parameters, row_losses_of
from tilewright.compress.budget.rises import rises_of
from tilewright.compress.budget.stages import run_stage, stage_recipe, write_model
from tilewright.compress.export.codes import calibration
from tilewright.compress.prune.prune import prune
from tilewright.training.components.dataset import held_out

CLAIM = "what FFN channels cut by a quarter and by half cost after recovery, beside the run with as many more steps"
SHARES = (0.25, 0.5)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    source = open_to_export(args.run)
    batches = held_out(source.recipe, source.data).batches
    whole, seen = row_losses_of(source.model, batches), calibration(source.recipe, source.data)[:8]
    found: dict[str, Any] = {
        "teacher_steps": source.recipe.train.steps,
        "steps": args.steps,
        "tokens_per_step": source.recipe.train.global_batch_size * source.recipe.data.seq_len,
        "loss": whole.loss,
        "parameters": parameters(source.model),
        "rows": sum(len(counts) for _, counts in whole.domains.values()),
    }

    def trained(name: str, folder: Path, *, taught: bool) -> Any:
        recipe = stage_recipe(source, name, args.work, folder=folder, taught=taught, steps=args.steps)
        return row_losses_of(open_to_export(run_stage(recipe, source)).model, batches)

    write_model(source, source.model, args.work / "whole")
    equal = trained("control", args.work / "whole", taught=False)
    found["run, as many steps more"] = rises_of(equal, whole, None)
    for share in SHARES:
        made = prune(source.model, {"ffn": share}, batches=seen).model
        folder = args.work / f"cut-{share:g}"
        write_model(source, made, folder)
        row = found[f"ffn -{100 * share:g} %"] = {"parameters": parameters(made)}
        row["before"] = rises_of(row_losses_of(made, batches), whole, equal)
        for name, taught in (("with teacher", True), ("without teacher", False)):
            row[name] = rises_of(trained(f"{name.split()[0]}-{share:g}", folder, taught=taught), whole, equal)
            write_result("prune_recovery", CLAIM, found)
            print(name, share, row, flush=True)


if __name__ == "__main__":
    main()

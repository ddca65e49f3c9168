"""What FFN channels cut by a quarter and by half cost a small run, fitted, then recovered with distillation or without
it, beside the run that got the same further steps.

Rises are of the held-out loss in FP32, relative, on the same rows, with the standard error of their differences: over
the run as it is, and over the run with as many more steps. The file is written after each seed; the same command
continues in its folder, which may be that of `prune_importance`.

python -m benchmarks.prune_recovery --work FOLDER [--teacher-steps 200] [--steps 60] [--seeds 3]
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from benchmarks.prune_stages import SHAPE, Study
from tilewright.compress.budget.measure import parameters, row_losses_of
from tilewright.compress.prune.prune import prune

CLAIM = "what FFN channels cut by a quarter and by half cost after recovery, beside the run with as many more steps"
SHARES = (0.25, 0.5)


def of_share(study: Study, share: float) -> dict[str, Any]:
    """Rises of a cut, and of both ways of recovery."""
    made = prune(study.source.model, {"ffn": share}, batches=study.seen, refit=True).model
    found: dict[str, Any] = {"parameters": [parameters(study.source.model), parameters(made)]}
    found["before"] = study.rises(row_losses_of(made, study.batches))
    for name, taught in (("with teacher", True), ("without teacher", False)):
        found[name] = study.rises(study.trained(f"{name.split()[0]}-{share:g}", made, taught=taught))
    return found


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    facts = {"teacher_steps": args.teacher_steps, "steps": args.steps}
    facts |= {"shape": {name: str(value) for name, value in SHAPE.items()}}
    seeds: dict[str, Any] = {}
    for seed in range(args.seeds):
        study = Study(args.work, seed, args.teacher_steps, args.steps)
        seeds[str(seed)] = {"teacher": study.case("teacher", study.facts)}
        for share in SHARES:
            seeds[str(seed)][f"ffn -{100 * share:g} %"] = study.case(
                f"ffn -{100 * share:g} %", lambda share=share, study=study: of_share(study, share)
            )
        write_result("prune_recovery", CLAIM, facts | {"seeds": seeds})


if __name__ == "__main__":
    main()

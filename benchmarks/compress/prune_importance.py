"""What each importance leaves of a small model: FFN channels cut by a quarter, then the layers behind them fitted, then
recovered, beside the teacher that got the same further steps.

Rises are of the held-out loss in FP32, relative, on the same rows, with the standard error of their differences: over
the teacher as it is, and over the teacher with as many more steps. The file is written after each seed; the same
command continues in its folder.

python -m benchmarks.compress.prune_importance --work FOLDER [--teacher-steps 200] [--steps 60] [--seeds 3]
"""

from pathlib import Path
from typing import Any

from benchmarks.common import parser_of, write_result
from benchmarks.compress.prune_stages import SHAPE, Study
from tilewright.compress.budget.held_out_rise import row_losses_of
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.unit_scores import METHODS, Method

CLAIM = "which importance is best before recovery, and after it, for a quarter of the FFN channels of a small model"
SHARE = 0.25


def of_method(study: Study, method: Method, seed: int) -> dict[str, Any]:
    """Rises of the cut model, of the same with fitted readers, and of this after recovery."""
    plain, fitted = (
        prune(study.source.model, {"ffn": SHARE}, importance=method, batches=study.seen, seed=seed, refit=refit).model
        for refit in (False, True)
    )
    found = {"cut": row_losses_of(plain, study.batches), "fitted": row_losses_of(fitted, study.batches)}
    found["recovered"] = study.trained(f"after-{method}", fitted, taught=True)
    return {name: study.rises(losses) for name, losses in found.items()}


def main() -> None:
    """Measure, and write the result."""
    parser = parser_of(__doc__, teacher_steps=200, steps=60, seeds=3)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    facts = {"share": SHARE, "teacher_steps": args.teacher_steps, "steps": args.steps}
    facts |= {"shape": {name: str(value) for name, value in SHAPE.items()}}
    seeds: dict[str, Any] = {}
    for seed in range(args.seeds):
        study = Study.of_text(args.work, seed, args.teacher_steps, args.steps)
        seeds[str(seed)] = {"teacher": study.case("teacher", study.facts)}
        for method in METHODS:
            seeds[str(seed)][method] = study.case(
                f"importance {method}", lambda method=method, study=study, seed=seed: of_method(study, method, seed)
            )
        write_result("prune_importance", CLAIM, facts | {"seeds": seeds})


if __name__ == "__main__":
    main()

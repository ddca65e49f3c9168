"""Whether what `compress` predicts of cuts made together is what they cost: sums of each kind's rise before recovery,
measured alone, beside the rise of twenty models with several kinds cut.

Rises are of the held-out loss in FP32, relative, on the same rows. A prediction is inside where it is at most two of
its own stated errors away. The file is written after each seed; the same command continues in its folder, which may be
that of `prune_recovery`.

python -m benchmarks.compress.prune_predicted --work FOLDER [--teacher-steps 200] [--plans 20] [--seeds 3]
"""

import argparse
import itertools
import random
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from benchmarks.compress.prune_stages import SHAPE, Study
from tilewright.compress.budget.candidates import CutPlan
from tilewright.compress.budget.measure import row_losses_of
from tilewright.compress.budget.sensitivity import CutCost, sensitivities
from tilewright.compress.prune.kinds import Kind
from tilewright.compress.prune.prune import prune

CLAIM = "the loss that compress predicts of a set of cuts is inside its stated error for at least 16 of 20 sets"
KINDS: tuple[Kind, ...] = ("ffn", "heads", "layers")
BATCHES = 3
"""Held-out micro-batches of each domain."""
ERRORS = 2.0
"""Stated errors that a prediction may be away: a standard error is exceeded one time in three by chance alone."""


def sets_of_cuts(costs: list[CutCost], number: int, seed: int) -> list[CutPlan]:
    """Cuts of two or three kinds at once, drawn from all combinations."""
    by_kind = [[None, *(cost for cost in costs if cost.kind == kind)] for kind in KINDS]
    together = [tuple(cut for cut in cuts if cut is not None) for cuts in itertools.product(*by_kind)]
    several = [CutPlan(cuts) for cuts in together if len(cuts) > 1]
    return random.Random(seed).sample(several, min(number, len(several)))


def of_seed(study: Study, plans: int, seed: int) -> dict[str, Any]:
    """Predicted and measured rises of each set."""
    model, batches = study.source.model, {domain: rows[:BATCHES] for domain, rows in study.batches.items()}
    whole = row_losses_of(model, batches)
    costs = sensitivities(model, whole, batches, KINDS, "activation", study.seen, _say, refit=True)
    rows = []
    for plan in sets_of_cuts(costs, plans, seed):
        made = prune(model, {cut.kind: cut.share for cut in plan.cuts}, batches=study.seen, refit=True).model
        rise, error = row_losses_of(made, batches).rise_over(whole)
        inside = abs(rise - plan.rise) <= ERRORS * plan.error
        rows.append(
            {"plan": plan.name, "predicted": plan.rise, "stated_error": plan.error, "rise": rise, "error": error}
            | {"inside": inside}
        )
        print(seed, rows[-1], flush=True)
    return {"costs": [cost.to_json() for cost in costs], "plans": rows, "inside": sum(row["inside"] for row in rows)}


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    facts: dict[str, Any] = {
        "teacher_steps": args.teacher_steps,
        "plans": args.plans,
        "errors": ERRORS,
        "batches": BATCHES,
    }
    facts |= {"shape": {name: str(value) for name, value in SHAPE.items()}}
    seeds: dict[str, Any] = {}
    for seed in range(args.seeds):
        study = Study.of_text(args.work, seed, args.teacher_steps, 0)
        name = f"predicted {args.plans}"
        seeds[str(seed)] = study.case(name, lambda study=study, seed=seed: of_seed(study, args.plans, seed))
        write_result("prune_predicted", CLAIM, facts | {"seeds": seeds})


if __name__ == "__main__":
    main()

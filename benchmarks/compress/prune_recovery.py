"""What FFN channels, and FFN channels with heads, cut by a quarter and by half cost a small run: before anything is
trained, recovered with distillation and without it, and the small shape from random weights, beside the run that got
the same further steps.

Rises are of the held-out loss in FP32, relative, on the same rows, with the standard error of their differences: over
the run as it is, and over the run with as many more steps. Recovery learns from 32 tokens of the teacher on disk; of
half of both also from whole distributions, and from these with hidden values of all layers. The file is written after
each seed; the same command continues in its folder, which may be that of `prune_importance`. `--runs` takes runs that
are there as the teachers, and writes another file, in which a run has its seed as its name.

python -m benchmarks.compress.prune_recovery --work FOLDER [--teacher-steps 200] [--steps 60] [--seeds 3]
    [--runs RUN ...] [--only "ffn and heads -25 %" ...] [--without "from random weights" ...]
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from benchmarks.compress.prune_stages import SHAPE, Study
from tilewright.cli.load_run import open_to_export
from tilewright.compress.budget.held_out_rise import RowLosses, parameters, row_losses_of
from tilewright.compress.prune.prune import prune
from tilewright.compress.prune.unit_kinds import Kind

CLAIM = "what a quarter and a half of FFN channels and heads cost after recovery, beside as many more steps of the run"
SHARES = (0.25, 0.5)
BOTH = ("ffn", "heads")
KINDS: tuple[tuple[Kind, ...], ...] = (("ffn",), BOTH)
LIVE = 0.5
"""The share of both kinds that is recovered from the whole distributions of the teacher, too."""


def of_cut(study: Study, kinds: tuple[Kind, ...], share: float, without: Sequence[str] = ()) -> dict[str, Any]:
    """Rises of a cut and of each way of recovery; of both kinds also of the shape from random weights.

    Args:
        study: the teacher.
        kinds: of units that are cut.
        share: of them.
        without: ways of recovery that are left out.
    """
    made = prune(study.source.model, dict.fromkeys(kinds, share), batches=study.seen, refit=True).model
    found: dict[str, Any] = {"parameters": [parameters(study.source.model), parameters(made)]}
    found["before"] = study.rises(row_losses_of(made, study.batches))
    prefix = "both-" if kinds == BOTH else ""
    ways: dict[str, Callable[[], RowLosses]] = {
        "with teacher": lambda: study.trained(f"{prefix}with-{share:g}", made, taught=True),
        "without teacher": lambda: study.trained(f"{prefix}without-{share:g}", made, taught=False),
    }
    if kinds == BOTH:
        ways["from random weights"] = lambda: study.from_random(f"{prefix}scratch-{share:g}", made)
    if kinds == BOTH and share == LIVE:
        ways["with hidden values"] = lambda: study.trained(
            f"{prefix}hidden-{share:g}", made, taught=True, cached=False, hidden=True
        )
        ways["with whole distributions"] = lambda: study.trained(
            f"{prefix}live-{share:g}", made, taught=True, cached=False
        )
    return found | {way: study.rises(trained()) for way, trained in ways.items() if way not in without}


def studies(args: argparse.Namespace) -> Iterator[tuple[str, Study]]:
    """By seed, of runs that are there or of small ones."""
    for run in args.runs:
        seed = open_to_export(run).recipe.run.seed
        yield str(seed), Study(args.work / f"run-{seed}", args.steps, run)
    if args.runs:
        return
    for seed in range(args.seeds):
        yield str(seed), Study.of_text(args.work, seed, args.teacher_steps, args.steps)


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], help="the teachers, instead of small ones")
    parser.add_argument("--only", nargs="+", default=[], help="cuts, such as 'ffn and heads -25 %%'")
    parser.add_argument("--without", nargs="+", default=[], help="ways of recovery, such as 'from random weights'")
    args = parser.parse_args()
    facts: dict[str, Any] = {"steps": args.steps}
    if not args.runs:
        facts |= {"teacher_steps": args.teacher_steps, "shape": {name: str(value) for name, value in SHAPE.items()}}
    seeds: dict[str, Any] = {}
    for seed, study in studies(args):
        seeds[seed] = {"teacher": study.case("teacher", study.facts)}
        for kinds, share in itertools.product(KINDS, SHARES):
            name = f"{' and '.join(kinds)} -{100 * share:g} %"
            if not args.only or name in args.only:
                seeds[seed][name] = study.case(
                    name, lambda kinds=kinds, share=share, study=study: of_cut(study, kinds, share, args.without)
                )
        write_result("prune_recovery_run" if args.runs else "prune_recovery", CLAIM, facts | {"seeds": seeds})


if __name__ == "__main__":
    main()

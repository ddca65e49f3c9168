"""Whether the time that `compress` predicts of cuts made together is what the cut model takes: the savings of each kind
alone, measured, beside the measured time of models with several kinds cut.

Times are of a forward pass of 32 tokens in FP32 here, as shares of the whole model's, which is measured in turn with
each; on one thread it is the thread's own processor time. Weights are random: what a cut saves does not depend on them.
A prediction is inside where it is at most 15 % away.

python -m benchmarks.compress.plan_latency [--plans 20] [--threads 1]
"""

import argparse
import itertools
import random
from typing import Any

import torch

from benchmarks.common import write_result
from tilewright.compress.budget.budget_rise import NEAR, near_in_time
from tilewright.compress.budget.call_seconds import machine_clock
from tilewright.compress.budget.cut_candidates import CutPlan
from tilewright.compress.budget.held_out_rise import parameters, seconds_beside
from tilewright.compress.budget.sensitivity import SHARES, CutCost
from tilewright.compress.prune.prune import MULTIPLE, left, prune
from tilewright.compress.prune.tensors_of_units import find_units
from tilewright.compress.prune.unit_kinds import Kind
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder

CLAIM = "the time that compress predicts of a set of cuts is within 15 % of the measured one for each of 20 sets"
KINDS: tuple[Kind, ...] = ("ffn", "heads", "layers")
SHAPES = {
    "default": {"vocab_size": 4096, "dim": 256, "num_layers": 6, "num_heads": 4, "tie_embeddings": True},
    "cpu_50m": {"vocab_size": 16384, "dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": 1408},
}


def costs_of(model: Decoder) -> list[CutCost]:
    """The time of each cut alone; losses are not measured."""
    units, _ = find_units(model)
    found = []
    for kind in KINDS:
        widths = {left(units[kind][0], share, MULTIPLE.get(kind, 1)): share for share in reversed(SHARES)}
        widths.pop(units[kind][0].count.units, None)
        for number, share in sorted(widths.items(), reverse=True):
            made = prune(model, {kind: share}, importance="l1").model
            seconds, whole = seconds_beside(made, model)
            saved = parameters(model) - parameters(made)
            before = units[kind][0].count.units
            found.append(CutCost(kind, share, number, before, 0.0, 0.0, saved, seconds / whole))
    return found


def sets_of_cuts(costs: list[CutCost], number: int) -> list[CutPlan]:
    """Cuts of two or three kinds at once, drawn from all combinations."""
    by_kind = [[None, *(cost for cost in costs if cost.kind == kind)] for kind in KINDS]
    together = [tuple(cut for cut in cuts if cut is not None) for cuts in itertools.product(*by_kind)]
    several = [CutPlan(cuts) for cuts in together if len(cuts) > 1]
    return random.Random(0).sample(several, min(number, len(several)))


def of_shape(shape: dict[str, Any], number: int) -> dict[str, Any]:
    """Predicted and measured times of sets of cuts."""
    model = Decoder(DecoderConfig.of(**shape))
    init_weights(model, seed=0)
    costs, rows = costs_of(model), []
    for plan in sets_of_cuts(costs, number):
        made = prune(model, {cut.kind: cut.share for cut in plan.cuts}, importance="l1").model
        seconds, whole = seconds_beside(made, model)
        measured = seconds / whole
        inside = near_in_time(plan.speed, measured)
        rows.append({"plan": plan.name, "predicted": plan.speed, "measured": measured, "inside": inside})
        rows[-1] |= {"away": plan.speed / measured - 1, "seconds": seconds, "whole_seconds": whole}
        print(rows[-1], flush=True)
    inside = sum(row["inside"] for row in rows)
    worst = max(abs(row["away"]) for row in rows)
    return {"shape": shape, "parameters": parameters(model), "plans": rows, "inside": inside, "worst": worst}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {name: of_shape(shape, args.plans) for name, shape in SHAPES.items()}
    facts = {"plans": args.plans, "threads": args.threads, "near": NEAR, "clock": machine_clock()[0]}
    write_result("plan_latency", CLAIM, facts | {"shapes": found})


if __name__ == "__main__":
    main()

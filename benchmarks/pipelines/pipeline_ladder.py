"""The ladder of idle time on 32 simulated ranks, PP 8 x DP 4, log-normal documents: from documents balanced by tokens
under 1F1B to the best that levers bring, and the cases in which that is not enough.

Simulated, not measured: the order of passes is torch's own, costs and links are given. Five steps, each of other
documents.

python -m benchmarks.pipelines.pipeline_ladder
"""

import statistics
from dataclasses import replace
from typing import Any

from benchmarks.common import parser_of, write_result
from tilewright.parallel.pipeline.split import Pipeline
from tilewright.planner.simulate.document_lengths import DrawnLengths
from tilewright.planner.simulate.ladder import Rung, climb, ladder_cases
from tilewright.planner.simulate.pass_costs import KindSeconds, Link, Network
from tilewright.planner.simulate.step_case import DocumentCosts, SimulatedCase
from tilewright.planner.simulate.torch_tables import torch_tables

CLAIM = (
    "simulated, PP 8 x DP 4, 32 micro-batches per row, log-normal documents: ranks idle for at least 23 % of a step "
    "with documents balanced by tokens under 1F1B, for less than 7 % with the levers on; which other cases keep to that"
)
BEFORE, AFTER = 0.23, 0.07
START = "balanced by tokens"
PP, DP, DOCUMENTS, SEEDS = 8, 4, 8, range(5)
LENGTHS = DrawnLengths("lognormal", (6.6, 1.1), 8192)
BASE = SimulatedCase(Pipeline(PP), DP, 32, layers=64, documents=DocumentCosts(6000.0), kinds=KindSeconds(0.1, 0.1, 0.1))


def slow(ranks: range) -> tuple[float, ...]:
    """Speeds of a world in which these ranks are 20 % slower."""
    return tuple(0.8 if rank in ranks else 1.0 for rank in range(PP * DP))


def linked(seconds: float) -> SimulatedCase:
    """Each message between ranks takes as long, on a link of its own per rank."""
    size = 64e6
    return replace(BASE, message_bytes=size, network=Network(1, inter=Link(size / seconds)))


NODE = range(20, 24)
"""Ranks of one node where neighbouring ranks share it (`torchrun`): one stage of all rows."""
ROW = range(1, PP * DP, 2 * DP)
"""The same where ranks go around eight nodes (`srun --distribution=cyclic`): half of the stages of one row."""
CASES: dict[str, SimulatedCase] = {
    "as the articles say": BASE,
    "messages of 2 % of a forward pass": linked(0.002),
    "messages of 30 % of a forward pass": linked(0.03),
    "24 micro-batches": replace(BASE, count=24),
    "16 micro-batches": replace(BASE, count=16),
    "cheap gradients of weights (1.4 and 0.6)": replace(BASE, kinds=KindSeconds(0.1, 0.14, 0.06)),
    "one rank of 32 slow": replace(BASE, speeds=slow(range(22, 23))),
    "one node of 4 ranks slow, 64 layers": replace(BASE, speeds=slow(NODE)),
    "one node of 4 ranks slow, 128 layers": replace(BASE, speeds=slow(NODE), layers=128),
    "one node of 4 ranks slow, all of one row, 64 layers": replace(BASE, speeds=slow(ROW)),
}


def measured(case: SimulatedCase, tables: Any) -> dict[str, Any]:
    """The rungs of a case, and whether it keeps to the claim: in every step."""
    rungs = climb(case, LENGTHS, list(SEEDS), DOCUMENTS, tables=lambda asked: {one: tables[one] for one in asked})
    done = [rung for rung in rungs if rung.steps]
    start = next(rung for rung in done if rung.name == START)
    best = min(done[done.index(start) :], key=lambda rung: statistics.median(rung.idle))
    same = min((rung for rung in done if runs_today(rung)), key=lambda rung: statistics.median(rung.idle))
    return {
        "before": statistics.median(start.idle),
        "after": statistics.median(best.idle),
        "best": best.name,
        "kept": min(start.idle) >= BEFORE and max(best.idle) < AFTER,
        "after_without_splits_of_rows": statistics.median(same.idle),
        "kept_without_splits_of_rows": min(start.idle) >= BEFORE and max(same.idle) < AFTER,
        "rungs": [rung.to_json() for rung in rungs],
    }


def runs_today(rung: Rung) -> bool:
    """A split for each row by itself is what no run does."""
    return rung.case.split != "own" and rung.case.packing != "padded"


def main() -> None:
    """All cases."""
    parser_of(__doc__).parse_args()
    asked = [(case.pipeline, case.count) for base in CASES.values() for _, case in ladder_cases(base)]
    tables = torch_tables(asked)
    results = {}
    for name, case in CASES.items():
        results[name] = found = measured(case, tables)
        print(f"{name:45s} {found['before']:.3f} -> {found['after']:.3f} {found['kept']} {found['best']}", flush=True)
    write_result("pipeline_ladder", CLAIM, results, arguments=())


if __name__ == "__main__":
    main()

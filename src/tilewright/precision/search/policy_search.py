"""The fastest policy inside an error budget: which matmuls of which layers compute in FP8, solved exactly.

A mixed-integer program, because quantisation is shared: an input is quantised once for all layers that read it, so the
second of them is cheaper than the first (`core.integer_program`). Costs come from `loss_model`, seconds from
`gemm_time`. Only fp8_tile and BF16 are chosen between. Read `SearchSpace`, then `fastest`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.core.errors import FitError
from tilewright.core.integer_program import NO_LIMIT, Column, LinearRow, minimise
from tilewright.precision.policy.gemm_formats import GEMM_NAMES, Gemms
from tilewright.precision.search.gemm_time import UnitTime
from tilewright.precision.search.layer_stats import SearchUnit
from tilewright.precision.search.loss_model import LossModel, Prediction, Product, percent

FORMATS = ("bf16", "fp8_tile")
"""Formats between which the search chooses. Tiles only: operands are shared by a layer's matmuls, hence one scaling."""
CURVE_POINTS = 24
GAP = 1e-6
"""Relative distance from the optimum at which the solver stops."""


@dataclass(frozen=True)
class PolicyCandidate:
    """A candidate policy: its matmuls in FP8, the predicted loss change, and the seconds of all its linear matmuls."""

    name: str
    fp8: frozenset[Product]
    predicted: Prediction
    seconds: float


@dataclass(frozen=True)
class SearchSpace:
    """Inputs of the solver.

    Args:
        units: of the model.
        model: predicted loss changes.
        times: seconds by unit name.
        fixed: formats that the recipe's own rules set, by matmul.
    """

    units: tuple[SearchUnit, ...]
    model: LossModel
    times: Mapping[str, UnitTime]
    fixed: Mapping[Product, str]

    def matmuls(self) -> list[Product]:
        """All matmuls of the search for a policy, in the model's order."""
        return [(unit.name, gemm) for unit in self.units for gemm in GEMM_NAMES]

    def may_be_fp8(self, matmul: Product) -> bool:
        """True if the search may run this matmul in FP8: no rule forbids it, and it gave no infinities or NaN."""
        wanted = self.fixed.get(matmul)
        return wanted == "fp8_tile" or (wanted is None and math.isfinite(self.model.costs[matmul]))

    def allowed(self) -> frozenset[Product]:
        """All matmuls that the search may put in FP8."""
        return frozenset(matmul for matmul in self.matmuls() if self.may_be_fp8(matmul))

    def required(self) -> frozenset[Product]:
        """The matmuls that a rule puts into FP8, which the search must keep there."""
        return frozenset(matmul for matmul, name in self.fixed.items() if name == "fp8_tile")

    def candidate(self, name: str, fp8: frozenset[Product]) -> PolicyCandidate:
        """A candidate policy of the search with its numbers, the recipe's rules followed."""
        fp8 = (fp8 & self.allowed()) | self.required()
        return PolicyCandidate(name, fp8, self.model.predict(fp8), self.seconds(fp8))

    def seconds(self, fp8: frozenset[Product]) -> float:
        """The seconds of a candidate policy: all linear matmuls of a micro-batch, quantisation included, each input
        quantised once."""
        total, rows, columns = 0.0, set(), set()
        for unit in self.units:
            time = self.times[unit.name]
            chosen = {gemm for gemm in GEMM_NAMES if (unit.name, gemm) in fp8}
            total += sum(time.fp8[gemm] if gemm in chosen else time.bf16[gemm] for gemm in GEMM_NAMES)
            if chosen & {"fprop", "wgrad"} and unit.reads not in rows:
                rows.add(unit.reads)
                total += time.input_row
            if "wgrad" in chosen and unit.reads not in columns:
                columns.add(unit.reads)
                total += time.input_column
            total += time.gradient_row * bool(chosen & {"dgrad", "wgrad"}) + time.gradient_column * ("wgrad" in chosen)
            total += time.weight * bool(chosen & {"fprop", "dgrad"})
        return total

    def formats(self, fp8: frozenset[Product]) -> dict[str, Gemms]:
        """Formats of each unit in the search."""
        return {
            unit.name: Gemms.of(*("fp8_tile" if (unit.name, gemm) in fp8 else "bf16" for gemm in GEMM_NAMES))
            for unit in self.units
        }


def fastest(space: SearchSpace, budget: float, name: str = "chosen") -> PolicyCandidate:
    """Search for the fastest policy whose predicted loss change is within the budget.

    Args:
        space: what may be chosen.
        budget: relative loss change, 0.0025 for 0.25 %.
        name: of the result.

    Raises:
        FitError: no policy is within the budget; the best possible is said.
    """
    least = space.candidate("best possible", frozenset())
    if not least.predicted.change <= budget:
        rules = len(space.required())
        raise FitError(
            "No policy within this loss budget",
            got=f"a budget of {percent(budget)}",
            need=f"{percent(least.predicted.change)} or more: the best possible, "
            + (f"with {rules} matmuls in FP8 as the recipe's rules say" if rules else "all matmuls in BF16"),
            try_=_possible(least.predicted.change, bool(rules)),
            where="--budget",
        )
    return space.candidate(name, _solve(space, budget))


def _possible(change: float, rules: bool) -> str:
    """A possible budget of the search to type instead of an impossible one."""
    budget = f'--budget "{math.ceil(change * 1e6) / 1e4:g}%"' if math.isfinite(change) else ""
    return ", or ".join(filter(None, (budget, "take rules out of precision.rules" if rules else "")))


def curve(space: SearchSpace, num: int = CURVE_POINTS) -> list[PolicyCandidate]:
    """The fastest policies over budgets from the least possible loss change to that of everything in FP8."""
    low = space.candidate("", frozenset()).predicted.change
    high = space.candidate("", space.allowed()).predicted.change
    if not math.isfinite(high):
        return []
    found: dict[frozenset[Product], PolicyCandidate] = {}
    for i in range(num):
        share = (i / max(num - 1, 1)) ** 4  # few matmuls cost most of it, so the bend is at small budgets
        candidate = fastest(space, low + share * (high - low) * (1 + 1e-9), "curve")
        found.setdefault(candidate.fp8, candidate)
    return list(found.values())


def baselines(space: SearchSpace) -> list[PolicyCandidate]:
    """The policies that people choose without a search: all BF16, all FP8, and FP8 but for the first and last block."""
    marks = [space.candidate("all BF16", frozenset()), space.candidate("all FP8", space.allowed())]
    blocks = {unit.name: int(found[1]) for unit in space.units if (found := re.search(r"(?<![^.])(\d+)\.", unit.name))}
    ends = {min(blocks.values()), max(blocks.values())} if blocks else set()
    if len(set(blocks.values())) > 2:
        inner = frozenset((name, gemm) for name, gemm in space.allowed() if blocks.get(name) not in ends)
        marks.append(space.candidate("first and last block BF16", inner))
    return marks


def _solve(space: SearchSpace, budget: float) -> frozenset[Product]:
    """Find the policy with the least seconds within a budget. The program has a variable of 0 or 1 for each matmul in
    FP8, and one for each quantisation that they need."""
    matmuls = space.matmuls()
    index = {matmul: i for i, matmul in enumerate(matmuls)}
    gains, needs = _objective(space, index)
    scale = max(map(abs, gains), default=0.0) or 1.0
    costs = [cost if math.isfinite(cost := space.model.costs[matmul]) else 0.0 for matmul in matmuls]
    cost_scale = max(costs, default=0.0) or 1.0
    required = space.required()
    columns = [
        Column(gains[i] / scale, float(matmul in required), float(space.may_be_fp8(matmul)), whole=True)
        for matmul, i in index.items()
    ]
    columns += [Column(gain / scale, upper=1.0) for gain in gains[len(matmuls) :]]
    rows = [LinearRow({quantisation: 1.0, matmul: -1.0}, lower=0.0) for matmul, quantisation in needs]
    rows.append(LinearRow({i: cost / cost_scale for i, cost in enumerate(costs)}, upper=budget / cost_scale + 1e-12))
    found = minimise(columns, rows, gap=GAP, nodes=NO_LIMIT, patience_s=math.inf)
    if found is None:
        raise AssertionError("the solver found nothing within a budget that is possible")
    return frozenset(matmul for matmul, i in index.items() if found.values[i] > 0.5)


def _objective(space: SearchSpace, index: Mapping[Product, int]) -> tuple[list[float], list[tuple[int, int]]]:
    """The seconds that each variable of the search adds, and pairs (matmul, quantisation that it needs) of
    variables."""
    gains = [0.0] * len(index)
    needs: list[tuple[int, int]] = []
    inputs: dict[tuple[int, str], int] = {}

    def variable(seconds: float) -> int:
        gains.append(seconds)
        return len(gains) - 1

    for unit in space.units:
        time = space.times[unit.name]
        fprop, dgrad, wgrad = (index[unit.name, gemm] for gemm in GEMM_NAMES)
        for gemm, i in zip(GEMM_NAMES, (fprop, dgrad, wgrad), strict=True):
            gains[i] += time.fp8[gemm] - time.bf16[gemm]
        gains[wgrad] += time.gradient_column
        for part, seconds in (("row", time.input_row), ("column", time.input_column)):
            if (unit.reads, part) not in inputs:
                inputs[unit.reads, part] = variable(seconds)
        row, column = inputs[unit.reads, "row"], inputs[unit.reads, "column"]
        gradient, weight = variable(time.gradient_row), variable(time.weight)
        needs += [(fprop, row), (wgrad, row), (wgrad, column), (dgrad, gradient), (wgrad, gradient)]
        needs += [(fprop, weight), (dgrad, weight)]
    return gains, needs


def speed_up(candidates: Sequence[PolicyCandidate], of: PolicyCandidate) -> float:
    """How many times as fast a searched policy's linear matmuls are as those of "all BF16" among the candidates."""
    base = next(candidate for candidate in candidates if candidate.name == "all BF16")
    return base.seconds / of.seconds if of.seconds else 1.0

"""Which cuts are tried: for each of some limits on the loss before recovery the smallest model within it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.compress.budget.compress_settings import Goal
from tilewright.compress.budget.sensitivity import CutCost
from tilewright.compress.prune.unit_kinds import Kind
from tilewright.core.integer_program import Column, LinearRow, minimise

FACTORS = (32.0, 16.0, 8.0, 4.0, 2.0, 1.0)
"""Limits on the loss before recovery, in budgets: recovery takes part of a cut's cost back, how much is not known."""

_OF_EXPERTS: tuple[Kind, ...] = ("experts", "expert_channels")


@dataclass(frozen=True)
class CutPlan:
    """Cuts that are made together, at most one of a kind.

    Args:
        cuts: of the sensitivities.
        rise, error: predicted rise of the loss before recovery, and its standard error: the sums over kinds.
    """

    cuts: tuple[CutCost, ...]

    @property
    def rise(self) -> float:
        return sum(cut.rise for cut in self.cuts)

    @property
    def error(self) -> float:
        return math.sqrt(sum(cut.error**2 for cut in self.cuts))

    @property
    def saved(self) -> int:
        """Parameters that a candidate cut saves if each kind is cut alone. Of kinds that share weights fewer go
        (`parameters_left`)."""
        return sum(cut.saved for cut in self.cuts)

    @property
    def speed(self) -> float:
        """Predicted seconds of a forward pass of a candidate cut, as a share of the whole model's: units of different
        kinds are different parts of a layer, whose savings add up, and layers that go save nothing more. Experts and
        their channels are one part, of which each cut leaves a share. Embedding and head take their time whatever is
        cut, so half of the layers take more than half of it.

        Example:
            >>> cut = lambda kind, speed: CutCost(kind, 0.5, 1, 2, 0.0, 0.0, 1, speed)
            >>> round(CutPlan((cut("ffn", 0.75), cut("heads", 0.85), cut("layers", 0.6))).speed, 3)
            0.4
        """
        layers = [cut for cut in self.cuts if cut.kind == "layers"]
        stay = math.prod(cut.units / cut.before for cut in layers)
        saved = sum(1 - cut.speed for cut in self.cuts if cut.kind not in ("layers", *_OF_EXPERTS))
        saved += 1 - math.prod(cut.speed for cut in self.cuts if cut.kind in _OF_EXPERTS)
        return math.prod(cut.speed for cut in layers) - stay * saved

    @property
    def name(self) -> str:
        """The name of a candidate plan of cuts, such as ffn-512-heads-3."""
        return "-".join(f"{cut.kind}-{cut.units}" for cut in self.cuts)

    def to_json(self) -> dict[str, Any]:
        """A candidate plan of cuts as plain types."""
        return {
            "name": self.name,
            "cuts": [cut.to_json() for cut in self.cuts],
            "rise_before": self.rise,
            "error": self.error,
            "saved": self.saved,
            "speed": self.speed,
        }


def cut_plans(found: Sequence[CutCost], budget: float, goal: Goal) -> list[CutPlan]:
    """Candidate plans of cuts to try, the largest first; empty where even the smallest cut costs more than the widest
    limit.

    Args:
        found: sensitivities.
        budget: of the loss after recovery.
        goal: what is made small.

    Example:
        >>> ffn = CutCost("ffn", 0.5, 64, 128, 0.02, 0.001, 100, 0.8)
        >>> costs = [ffn, CutCost("heads", 0.5, 2, 4, 0.01, 0.001, 30, 0.9)]
        >>> [plan.name for plan in cut_plans(costs, 0.01, "bytes")]
        ['ffn-64-heads-2', 'ffn-64', 'heads-2']
    """
    plans = (_within(found, factor * budget, goal) for factor in FACTORS)
    return list({plan.name: plan for plan in plans if plan is not None}.values())


def by_halves(plans: Sequence[CutPlan], tries: int, inside: Callable[[CutPlan], bool]) -> CutPlan | None:
    """The largest candidate that is inside the budget, of those that were tried: the middle one of what is left, then
    the larger half where it is inside, else the smaller one. A smaller cut is taken to cost less.

    Args:
        plans: the largest cut first.
        tries: at most.
        inside: tries one.

    Example:
        >>> plans = [CutPlan((CutCost("ffn", 0.0, units, 160, 0.0, 0.0, 0, 1.0),)) for units in (32, 64, 96, 128, 160)]
        >>> by_halves(plans, 3, lambda plan: plan.cuts[0].units >= 64).name
        'ffn-64'
    """
    begin, end, found = 0, len(plans), None
    for _ in range(tries):
        if begin == end:
            break
        middle = (begin + end) // 2
        if inside(plans[middle]):
            found, end = plans[middle], middle
        else:
            begin = middle + 1
    return found


def _within(found: Sequence[CutCost], limit: float, goal: Goal) -> CutPlan | None:
    kinds = dict.fromkeys(cut.kind for cut in found)
    columns = [Column(_won(cut, goal), upper=1, whole=True) for cut in found]
    at_most_one = [LinearRow({i: 1.0 for i, cut in enumerate(found) if cut.kind == kind}, upper=1) for kind in kinds]
    loss = LinearRow({i: max(cut.rise, 0.0) for i, cut in enumerate(found)}, upper=limit)
    solution = minimise(columns, [*at_most_one, loss], gap=0)
    chosen = (
        () if solution is None else tuple(c for c, value in zip(found, solution.values, strict=True) if value > 0.5)
    )
    return CutPlan(chosen) if chosen else None


def _won(cut: CutCost, goal: Goal) -> float:
    """The change that a candidate cut makes to the goal: negative if it brings it nearer."""
    return -float(cut.saved) if goal == "bytes" else cut.speed - 1

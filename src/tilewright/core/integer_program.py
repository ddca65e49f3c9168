"""Linear programs with whole numbers, solved by HiGHS.

`highspy` alone, not what scipy wraps around it: that takes half a second and 50 MiB to import, in a process that then
trains.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.core.errors import FitError

NODES = 20_000
"""Nodes of the search tree after which the best that was found counts, on a busy machine as on a quiet one."""
NO_LIMIT = 2**31 - 1
"""Nodes where the best is to be proven, however long that takes."""
PATIENCE_S = 120.0
"""Seconds after which the same holds, far beyond what those nodes take: the last resort, and answers say so."""


class OutOfTime(FitError):
    """Nothing was found within the limits, nor that there is nothing."""


@dataclass(frozen=True)
class Column:
    """A variable of a linear program (MIP): its cost, its bounds, and whether it is a whole number."""

    cost: float = 0.0
    lower: float = 0.0
    upper: float = math.inf
    whole: bool = False


@dataclass(frozen=True)
class LinearRow:
    """A constraint: `lower` <= sum of the entries' values times their columns <= `upper`."""

    entries: Mapping[int, float]
    lower: float = -math.inf
    upper: float = math.inf

    @property
    def content(self) -> "RowContent":
        """The entries of a linear program's row without zeros, and its bounds."""
        return tuple((place, value) for place, value in self.entries.items() if value), self.lower, self.upper


RowContent = tuple[tuple[tuple[int, float], ...], float, float]


@dataclass(frozen=True)
class Solution:
    """Values of the columns. `gap`: share of its cost by which another solution might still be better. `by_clock`: the
    clock ended the search, so that a faster machine, or one with less to do, may find a better one."""

    values: tuple[float, ...]
    gap: float
    by_clock: bool = False


def minimise(
    columns: Sequence[Column],
    rows: Sequence[LinearRow],
    *,
    gap: float,
    nodes: int = NODES,
    patience_s: float = PATIENCE_S,
) -> Solution | None:
    """Find the cheapest values of a linear program with whole numbers (MIP) that meet all constraints; None if there
    are none. Equal programs are solved once.

    Args:
        columns: variables.
        rows: constraints, by the columns' places.
        gap: share of the cost by which the answer may miss the least.
        nodes: of the search tree after which the best that was found counts, with the gap that is known then.
        patience_s: seconds after which the same holds.

    Raises:
        OutOfTime: nothing was found within these limits, nor that there is nothing.

    Example:
        >>> coins = [Column(1, whole=True), Column(1, whole=True)]  # of 5 and of 3, as few as possible
        >>> minimise(coins, [LinearRow({0: 5, 1: 3}, 11, 11)], gap=0).values
        (1.0, 2.0)
    """
    return _solved(tuple(columns), tuple(row.content for row in rows), gap, nodes, patience_s)


@functools.lru_cache(maxsize=256)
def _solved(
    columns: tuple[Column, ...], rows: tuple[RowContent, ...], gap: float, nodes: int, patience_s: float
) -> Solution | None:
    if not columns:  # of which HiGHS says neither that it is solved nor that it cannot be
        return Solution((), 0.0) if all(lower <= 0 <= upper for _, lower, upper in rows) else None
    import highspy  # here: most commands need no solver
    import numpy as np

    solver = highspy.Highs()
    options = {
        "output_flag": False, "threads": 1, "mip_rel_gap": gap, "mip_abs_gap": 0.0,
        "mip_max_nodes": nodes, "time_limit": patience_s,
    }  # fmt: skip
    for name, value in options.items():
        solver.setOptionValue(name, value)
    for place, column in enumerate(columns):
        solver.addVar(column.lower, column.upper)
        solver.changeColCost(place, column.cost)
        if column.whole:
            solver.changeColIntegrality(place, highspy.HighsVarType.kInteger)
    for entries, lower, upper in rows:
        places = np.fromiter((place for place, _ in entries), np.int32, len(entries))
        values = np.fromiter((value for _, value in entries), np.float64, len(entries))
        solver.addRow(lower, upper, len(entries), places, values)
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    by_clock = status == highspy.HighsModelStatus.kTimeLimit
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        whole = any(column.whole for column in columns)
        return Solution(tuple(solver.getSolution().col_value), info.mip_gap if whole else 0.0, by_clock)
    if by_clock or status == highspy.HighsModelStatus.kSolutionLimit:  # what HiGHS calls its limit on nodes
        spent = f"{patience_s:g} s" if by_clock else f"{nodes:,} nodes"
        raise OutOfTime(
            "Solver was stopped before it found a plan that fits",
            got=f"{spent}, {len(columns)} variables, {len(rows)} constraints",
            need="a budget with more room",
            try_="a larger budget, or fix some of what is open in the recipe",
        )
    if status not in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        raise AssertionError(f"HiGHS ended with {solver.modelStatusToString(status)}")
    return None

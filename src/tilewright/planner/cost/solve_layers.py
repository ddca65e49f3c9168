"""How many layers of each group take which option, so that a step is fastest within the budgets at every phase.

Pure arithmetic over bytes and seconds; what they stand for is `planner.cost.layer_choices`. A count for each option of
each group, in a program of whole numbers (`core.integer_program`). Options that another one beats in everything are
dropped before. The optimum equals that of brute force on every case small enough to enumerate
(tests/planner/test_solve.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from tilewright.core.integer_program import NODES, PATIENCE_S, Column, LinearRow, minimise
from tilewright.planner.cost.operations import Holding

Transient = Literal["none", "forward", "backward"]
_SLACK = 1e-7
"""Share of a budget that the solver's own tolerance may use up, left free."""


@dataclass(frozen=True)
class Cost:
    """The cost of one layer under an option.

    `seconds`: of a step. `held`: bytes on the device all the time. `kept`: bytes on the device from forward to
    backward. `gradient`: bytes of gradients that stay until the update. `host`, `disk`: bytes there. `forward`,
    `backward`: bytes on the device while this layer runs, one layer at a time. `once`: bytes on the device all the
    time where any layer of the group takes the option, however many do: code that was compiled for it. `holdings`: of
    what all bytes are sums, where that is known.
    """

    seconds: float
    held: float = 0.0
    kept: float = 0.0
    gradient: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0
    holdings: tuple[Holding, ...] = ()

    @classmethod
    def of(cls, seconds: float, holdings: Sequence[Holding]) -> "Cost":
        """Cost of a layer for the solver, from its holdings, summed by their life, or by their place where that is not
        the device."""
        found: dict[str, float] = {}
        for one in holdings:
            name = _SUMS[one.life] if one.place == "device" else one.place
            found[name] = found.get(name, 0.0) + one.bytes
        return cls(seconds, **found, holdings=tuple(one for one in holdings if one.bytes))

    def for_phase(self, transient: Transient) -> float:
        """The solver's bytes on the device while this layer runs in a phase."""
        return {"none": 0.0, "forward": self.forward, "backward": self.backward}[transient]


_SUMS = {"always": "held", "gradients": "gradient"} | {name: name for name in ("kept", "forward", "backward", "once")}
COSTS = tuple(field.name for field in fields(Cost) if field.name != "holdings")


@dataclass(frozen=True)
class ChoiceGroup:
    """`count` layers that have the same options; the names of options are the caller's."""

    name: str
    count: int
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Phase:
    """The memory of a phase of a step: bytes that no choice changes, that all groups hold, that the named groups keep,
    and one running layer's.

    `owners`: bytes that no choice changes, by owner. `passed`: no layer runs, and what its work took are free pages.
    `freed`: what the groups kept is free again too, and its pages stay with the process.
    """

    name: str
    owners: Mapping[str, float]
    kept: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    transient: Transient = "none"
    passed: bool = False
    freed: bool = False

    @property
    def base(self) -> float:
        """Bytes of a phase that no choice of the solver changes."""
        return sum(self.owners.values())


@dataclass(frozen=True)
class PlanProblem:
    """Groups, phases and budgets in bytes. `host_base`: of the host, whatever is chosen."""

    groups: tuple[ChoiceGroup, ...]
    phases: tuple[Phase, ...]
    device_budget: float
    host_budget: float
    host_base: float = 0.0
    disk_budget: float = math.inf


Counts = tuple[tuple[int, ...], ...]
"""Layers by group and option."""


@dataclass(frozen=True)
class Answer:
    """Counts, the share of their seconds (of their peak) that the best may be below them, and whether the clock has
    ended the search."""

    counts: Counts
    gap: float = 0.0
    by_clock: bool = False


def phase_bytes(problem: PlanProblem, phase: Phase, counts: Counts) -> float:
    """Device bytes of a phase under the counts of the solver's answer."""
    total, running = phase.base, 0.0
    for group, row in zip(problem.groups, counts, strict=True):
        for cost, count in zip(group.costs, row, strict=True):
            total += count * cost.held
            total += count * cost.kept if group.name in phase.kept else 0.0
            total += count * cost.gradient if group.name in phase.gradients else 0.0
            if count:
                total += cost.once
                running = max(running, cost.for_phase(phase.transient))
    return total + running


def host_bytes(problem: PlanProblem, counts: Counts) -> float:
    """Bytes of the host under the counts of the solver's answer."""
    return problem.host_base + _total(problem, counts, "host")


def seconds(problem: PlanProblem, counts: Counts) -> float:
    """Seconds of the layers under the counts of the solver's answer."""
    return _total(problem, counts, "seconds")


def _total(problem: PlanProblem, counts: Counts, name: str) -> float:
    rows = zip(problem.groups, counts, strict=True)
    return sum(n * getattr(cost, name) for group, row in rows for cost, n in zip(group.costs, row, strict=True))


def least_seconds(problem: PlanProblem) -> float:
    """The least seconds of any plan of these groups, whatever the budgets: the solver's bound."""
    return sum(group.count * min(cost.seconds for cost in group.costs) for group in problem.groups)


def solve(problem: PlanProblem, *, smallest: bool = False, gap: float = 1e-9) -> Answer | None:
    """Solve for the fastest counts of options of layers within the budgets; None where nothing fits.

    Args:
        problem: groups, phases and budgets.
        smallest: minimise the device's peak instead, whatever the device's budget; those of host and disk still hold.
        gap: share of the optimum by which the answer may miss it. It misses it by more where the solver is stopped.

    Raises:
        OutOfTime: the solver was stopped and had found nothing.
    """
    if not smallest and _plainly_too_large(problem):
        return None
    kept = [_undominated(group.costs) for group in problem.groups]
    thin = replace(
        problem,
        groups=tuple(
            replace(group, costs=tuple(group.costs[i] for i in chosen))
            for group, chosen in zip(problem.groups, kept, strict=True)
        ),
    )
    found = _integer_program(thin, smallest, gap)
    if found is None:
        return None
    counts = []
    for group, chosen, row in zip(problem.groups, kept, found.counts, strict=True):
        wide = [0] * len(group.costs)
        for i, count in zip(chosen, row, strict=True):
            wide[i] = count
        counts.append(tuple(wide))
    return replace(found, counts=tuple(counts))


def stopped_note(answer: Answer, better: str, gap: float) -> tuple[str, ...]:
    """A note where solving was stopped before it had proven that a plan is the best.

    Args:
        answer: of the solver.
        better: than the plan another one may be.
        gap: that was asked for.
    """
    if answer.gap <= 2 * gap:
        return ()
    after = f"after {NODES:,} nodes"
    if answer.by_clock:
        after = f"by the clock after {PATIENCE_S:g} s, so a machine with less to do may find another plan"
    return (f"the solver was stopped {after}: a plan up to {answer.gap:.2%} {better} may exist",)


def left_out_note(number: int) -> tuple[str, ...]:
    """A note where solving for other settings than the plan's own was not brought to an end, for so many."""
    if not number:
        return ()
    return (f"the solver was stopped before it found anything for {number} of the settings, which are left out",)


def _plainly_too_large(problem: PlanProblem) -> bool:
    """True if what must be somewhere is more than all places together, or the least that a phase has is more than the
    device: known without the solver."""
    least = sum(
        group.count * min(cost.held + cost.host + cost.disk for cost in group.costs) for group in problem.groups
    )
    base = min((phase.base for phase in problem.phases), default=0.0)
    if least + base + problem.host_base > problem.device_budget + problem.host_budget + problem.disk_budget:
        return True
    return any(_least_bytes(problem, phase) > problem.device_budget for phase in problem.phases)


def _least_bytes(problem: PlanProblem, phase: Phase) -> float:
    """The least device bytes of a phase, whatever each group of layers takes: the solver's bound on memory."""
    found, running = phase.base, 0.0
    for group in problem.groups:
        kept, gradients = group.name in phase.kept, group.name in phase.gradients
        sizes = [cost.held + kept * cost.kept + gradients * cost.gradient for cost in group.costs]
        found += group.count * min(sizes)
        running = max(running, min(cost.for_phase(phase.transient) for cost in group.costs))
    return found + running


def _undominated(costs: Sequence[Cost]) -> list[int]:
    """Places of the layers' options that no other one equals or beats in everything, for the solver."""
    rows = [tuple(getattr(cost, name) for name in COSTS) for cost in costs]
    return [
        i
        for i, row in enumerate(rows)
        if not any(
            all(a <= b for a, b in zip(other, row, strict=True)) and (other != row or j < i)
            for j, other in enumerate(rows)
            if j != i
        )
    ]


class _Columns:
    """The variables of the linear program: a count and a used-or-not for each option, the running layer's bytes, the
    peak."""

    def __init__(self, groups: Sequence[ChoiceGroup]) -> None:
        self.options = [(g, o) for g, group in enumerate(groups) for o in range(len(group.costs))]
        self.size = 2 * len(self.options) + 3
        self.running: Mapping[str, int] = {"forward": self.size - 3, "backward": self.size - 2}
        self.peak = self.size - 1


def _integer_program(problem: PlanProblem, smallest: bool, gap: float) -> Answer | None:
    columns = _Columns(problem.groups)
    unit = max(problem.device_budget, *(phase.base for phase in problem.phases), 1.0)  # however small the budget
    costs = [problem.groups[g].costs[o].seconds for g, o in columns.options]
    scale = max(costs, default=0.0) or 1.0
    counts = [
        Column(0.0 if smallest else cost / scale, upper=problem.groups[g].count, whole=True)
        for cost, (g, _) in zip(costs, columns.options, strict=True)
    ]
    used = [Column(upper=1, whole=True)] * len(counts)
    peak = Column(1.0 if smallest else 0.0)
    found = minimise([*counts, *used, Column(), Column(), peak], _rows(problem, columns, unit, smallest), gap=gap)
    if found is None:
        return None
    values = iter(round(value) for value in found.values[: len(counts)])
    counts_by_group = tuple(tuple(next(values) for _ in group.costs) for group in problem.groups)
    return Answer(counts_by_group, found.gap, found.by_clock)


def _rows(problem: PlanProblem, columns: _Columns, unit: float, smallest: bool) -> list[LinearRow]:
    """Constraints of the solver's program as rows; bytes in units of about a device's memory."""
    num = len(columns.options)
    rows: list[LinearRow] = []
    for g, group in enumerate(problem.groups):
        mine = [i for i, (owner, _) in enumerate(columns.options) if owner == g]
        rows.append(LinearRow(dict.fromkeys(mine, 1.0), group.count, group.count))
    for i, (g, o) in enumerate(columns.options):
        group = problem.groups[g]
        rows.append(LinearRow({i: 1.0, num + i: -float(group.count)}, upper=0.0))  # a count means that it is used
        for name, place in columns.running.items():
            rows.append(LinearRow({place: 1.0, num + i: -getattr(group.costs[o], name) / unit}, lower=0.0))
    room = (1.0 - _SLACK) * problem.device_budget / unit
    for phase in problem.phases:
        entries: dict[int, float] = {}
        for i, (g, o) in enumerate(columns.options):
            group, cost = problem.groups[g], problem.groups[g].costs[o]
            size = cost.held + (cost.kept if group.name in phase.kept else 0.0)
            entries[i] = (size + (cost.gradient if group.name in phase.gradients else 0.0)) / unit
            entries[num + i] = cost.once / unit
        if phase.transient != "none":
            entries[columns.running[phase.transient]] = 1.0
        if smallest:
            entries[columns.peak] = -1.0
        rows.append(LinearRow(entries, upper=(0.0 if smallest else room) - phase.base / unit))
    limits = (("host", problem.host_budget, problem.host_base), ("disk", problem.disk_budget, 0.0))
    for name, limit, base in limits:
        if math.isfinite(limit):
            entries = {i: getattr(problem.groups[g].costs[o], name) / unit for i, (g, o) in enumerate(columns.options)}
            rows.append(LinearRow(entries, upper=(limit * (1.0 - _SLACK) - base) / unit))
    return rows

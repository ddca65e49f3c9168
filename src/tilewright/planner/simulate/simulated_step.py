"""The results of a simulated step: its seconds, why ranks are idle, what communication is waited for, what activations
ranks hold, and which passes decide how long it takes.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright.planner.simulate.pass_costs import Network, StepCosts
from tilewright.planner.simulate.schedule_table import Place, ScheduleTable, Slot
from tilewright.planner.simulate.slot_times import SlotTimes, Timeline, simulate

CAUSES = (
    "filling and draining",
    "unequal stages",
    "unequal micro-batches",
    "unequal rows",
    "messages",
    "data",
    "sum of gradients",
)
"""Why ranks are idle: the schedule, where all costs are equal; stages or ranks that take longer than others;
micro-batches of a row that do; rows that end before others; messages between stages; reading; gradients that are summed
over rows. As of a measured step (`parallel.pipeline.balance.replay`), which tells no messages from other causes."""


@dataclass(frozen=True)
class SimulatedStep:
    """A step of all rows."""

    costs: StepCosts
    timeline: Timeline

    @staticmethod
    def of(table: ScheduleTable, costs: StepCosts) -> "SimulatedStep":
        """Simulate a step.

        Raises:
            ConfigError: passes of the table wait for each other.
        """
        return SimulatedStep(costs, simulate(table, costs))

    @property
    def table(self) -> ScheduleTable:
        """The schedule's table of each row of a simulated step."""
        return self.timeline.table

    @cached_property
    def summed_s(self) -> list[float]:
        """When in a simulated step the gradients of each rank of a row are summed over the rows."""
        return [max(self.timeline.ends_s(rank)) + self.costs.reduce_s for rank in range(self.table.num_ranks)]

    @property
    def seconds(self) -> float:
        """Seconds of the simulated step."""
        return max(self.summed_s) + self.costs.optimizer_s

    @property
    def num_ranks(self) -> int:
        """Ranks of all rows of a simulated step."""
        return self.costs.num_rows * self.table.num_ranks

    @cached_property
    def busy_s(self) -> float:
        """Seconds that all ranks of a simulated step spend in passes and the optimizer."""
        passes = (one.end_s - one.begin_s for row in self.timeline.rows for rank in row for one in rank)
        return math.fsum(passes) + self.num_ranks * self.costs.optimizer_s

    @property
    def idle(self) -> float:
        """Share of the ranks' time in a simulated step in which they wait."""
        return 1 - self.busy_s / (self.num_ranks * self.seconds)

    @cached_property
    def exposed_s(self) -> list[float]:
        """Seconds of a simulated step in which a rank could not work since a message was on its way to it, and in which
        its gradients were summed, by rank of the world."""
        found = [0.0] * self.num_ranks
        for row, ranks in enumerate(self.timeline.rows):
            for rank, slots in enumerate(ranks):
                waits = (_in_flight(one, before) for one, before in zip(slots, _ends(slots), strict=False))
                found[self.costs.world_rank(row, rank)] = math.fsum(waits) + self.costs.reduce_s
        return found

    @property
    def exposed(self) -> float:
        """Share of the ranks' time in a simulated step that is exposed communication."""
        return math.fsum(self.exposed_s) / (self.num_ranks * self.seconds)

    def held(self, row: int, rank: int) -> list[tuple[float, float]]:
        """Activations held in a simulated step as (seconds, activations) of a rank of a row after each slot that
        changes them, in micro-batches of work 1 through all stages of a rank with an equal share of the layers.

        A forward pass keeps what its backward pass reads, from its beginning to the end of the last part of that.
        """
        costs, held, found = self.costs.passes, 0.0, [(0.0, 0.0)]
        for slot, times in zip(self.table.rows[rank], self.timeline.rows[row][rank], strict=True):
            kept = math.fsum(costs.held(row, one) for one in slot if one.kind == "F")
            freed = math.fsum(costs.held(row, one) for one in slot if one.kind in "BW")
            if kept:
                held += kept
                found.append((times.begin_s, held))
            if freed:
                held -= freed
                found.append((times.end_s, held))
        return found

    @cached_property
    def peaks(self) -> list[float]:
        """Most activations in a simulated step that each rank of the world holds, as `held` counts them."""
        found = [0.0] * self.num_ranks
        for row in range(self.costs.num_rows):
            for rank in range(self.table.num_ranks):
                found[self.costs.world_rank(row, rank)] = max(held for _, held in self.held(row, rank))
        return found

    def critical_path(self) -> list[tuple[int, Place]]:
        """(row, slot) of the passes of a simulated step that decide when the last pass ends, from the first to the last
        one: had one of them, or what is waited for between them, been shorter, the passes might have ended earlier."""
        ends = {(row, rank): of[rank][-1].end_s for row, of in enumerate(self.timeline.rows) for rank in range(len(of))}
        row, rank = max(ends, key=lambda key: (ends[key], key))
        place: Place | None = (rank, len(self.table.rows[rank]) - 1)
        found = []
        while place is not None:
            found.append((row, place))
            times, number = self.timeline.rows[row][place[0]], place[1]
            waited = number == 0 or times[number].begin_s > times[number - 1].end_s
            place = times[number].last if waited else (place[0], number - 1)
        return found[::-1]

    def slot(self, place: Place) -> Slot:
        """The slot of a simulated step's table at a place."""
        return self.table.rows[place[0]][place[1]]


def _ends(slots: Sequence[SlotTimes]) -> Iterator[float]:
    """When in a simulated step what was before each slot was over."""
    yield 0.0
    for one in slots:
        yield one.end_s


def _in_flight(one: SlotTimes, before: float) -> float:
    """Seconds before a slot of a simulated step in which nothing but a message was missing."""
    return 0.0 if one.from_data else max(0.0, one.begin_s - max(before, one.sent_s))


def idle_by_cause(step: SimulatedStep) -> dict[str, float]:
    """Divide the idle time of a simulated step by cause: shares of the ranks' time, which add up to `step.idle`.

    The step is simulated again with one cause after the other: in each row equal passes; stages and ranks as they are;
    micro-batches; rows; messages; data; and gradients summed. A cause has the time that it adds. It may be negative:
    one cause can fill what another one leaves.
    """
    costs, table, rows = step.costs, step.table, step.costs.num_rows
    bare = replace(costs, network=Network(), ready_s=())
    equal, even = costs.passes.equal_rows(table.rank_of), costs.passes.even_rows()
    spans = [_work_s(step)]
    spans += [_spans_s(simulate(table, replace(bare, passes=passes))) for passes in (equal, even, costs.passes)]
    whole = [max(spans[-1]), simulate(table, replace(costs, ready_s=())).passes_s, step.timeline.passes_s]
    spans += [[seconds] * rows for seconds in (*whole, step.seconds - costs.optimizer_s)]
    return {
        cause: math.fsum(later - sooner for sooner, later in zip(before, after, strict=True)) / rows / step.seconds
        for cause, (before, after) in zip(CAUSES, itertools.pairwise(spans), strict=True)
    }


def _work_s(step: SimulatedStep) -> list[float]:
    """The seconds of passes per rank in each row of a simulated step."""
    return [math.fsum(one.end_s - one.begin_s for rank in row for one in rank) / len(row) for row in step.timeline.rows]


def _spans_s(timeline: Timeline) -> list[float]:
    """The seconds until the last pass of each row of a simulated step is over."""
    return [max(rank[-1].end_s for rank in row) for row in timeline.rows]

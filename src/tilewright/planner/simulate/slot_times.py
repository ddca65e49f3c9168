"""When each slot of a schedule's table begins and ends, given what passes and messages cost. No torch.

Events in the order of their time. A rank works through its slots in the table's order; a slot begins once the one
before it is over and all it needs has arrived: a forward pass needs that of the stage before, a backward pass that of
the stage behind and its own forward pass, gradients of weights their backward pass. What another rank has made travels
over a link, on which messages follow each other in the order in which they were made. Sending takes no time of a rank.
"""

import heapq
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tilewright.core.errors import ConfigError
from tilewright.planner.simulate.pass_costs import Path, StepCosts
from tilewright.planner.simulate.schedule_table import Place, ScheduleTable, Slot, slot_text


class SlotTimes(NamedTuple):
    """When a slot was worked on, in seconds since the step's beginning."""

    begin_s: float
    end_s: float
    sent_s: float = 0.0
    """When the last of what it needed was made."""
    last: Place | None = None
    """The slot that made it; None: nothing was needed, or it was read from the data."""
    from_data: bool = False
    """The last of what it needed was the data."""


@dataclass(frozen=True)
class Timeline:
    """The times of all slots, by row, rank of it, and slot."""

    table: ScheduleTable
    rows: tuple[tuple[tuple[SlotTimes, ...], ...], ...]

    @cached_property
    def passes_s(self) -> float:
        """The seconds until the last pass of the slots is over."""
        return max(ranks[-1].end_s for row in self.rows for ranks in row)

    def ends_s(self, rank: int) -> list[float]:
        """The seconds until this rank of each row has done its last slot."""
        return [row[rank][-1].end_s for row in self.rows]


def simulate(table: ScheduleTable, costs: StepCosts) -> Timeline:
    """Simulate every row of ranks: when each slot begins and ends.

    Args:
        table: of a row; all rows have the same.
        costs: of as many stages, ranks and micro-batches.

    Raises:
        ConfigError: slots of the table wait for each other; two that do are named.
    """
    return _Run(table, costs).done()


class _Row:
    """A row's state. Slots have their numbers in the whole table."""

    def __init__(self, number: int, table: ScheduleTable, costs: StepCosts) -> None:
        self.number, passes = number, costs.passes
        self.work = passes.work[number]
        self.seconds = [one for rank, slots in enumerate(table.rows) for one in passes.of_slots(number, rank, slots)]
        self.open = list(table.needs.counts)
        """What each slot still waits for."""
        self.last: list[tuple[float, int | None] | None] = [None] * len(self.open)
        """Of what has come for a slot the last: when it was made, and by which slot."""
        self.next = list(table.needs.first)
        """By rank the slot that is its turn."""
        self.busy = [False] * table.num_ranks
        self.found: list[list[SlotTimes]] = [[] for _ in table.rows]
        self.paths: dict[tuple[int, int], Path] = {}


class _Run:
    """The state of a simulation: the passes under way, and the message that each rank waits for."""

    def __init__(self, table: ScheduleTable, costs: StepCosts) -> None:
        self._table, self._costs, self._needs = table, costs, table.needs
        self._rank_of, self._ends, self._makes = table.needs.rank_of, table.needs.ends, table.needs.makes
        self._rows = [_Row(number, table, costs) for number in range(costs.num_rows)]
        self._links: dict[tuple[int, ...], float] = {}
        self._events: list[tuple[float, int, _Row, int, int | None, float]] = []
        """(time, number, row, slot, the slot that made what arrives, when); a slot that is over has itself there."""
        self._count = 0

    def done(self) -> Timeline:
        """Run the slots of a schedule to the end, for their times."""
        for number, ready in enumerate(self._costs.ready_s):
            row = self._rows[number]
            for slot, passes in self._reads():
                row.open[slot] += 1
                time = max(ready[one.microbatch] for one in passes if one.stage == 0 and one.kind == "F")
                self._later(time, row, slot, None, time)
        for row in self._rows:
            for rank in range(self._table.num_ranks):
                self._try(row, rank, 0.0)
        while self._events:
            time, _, row, slot, maker, sent = heapq.heappop(self._events)
            if maker == slot:
                self._over(row, slot, time)
            else:
                self._arrived(row, slot, maker, sent, time)
        done = [
            len(made) for made in self._rows[0].found
        ]  # rows have one table: none ends where the first one does not
        if done != [len(slots) for slots in self._table.rows]:
            raise _stuck(self._table, done)
        return Timeline(self._table, tuple(tuple(map(tuple, row.found)) for row in self._rows))

    def _reads(self) -> list[tuple[int, Slot]]:
        """Slots that begin with the batch, and their passes, for the times."""
        slots = itertools.chain.from_iterable(self._table.rows)
        return [
            (number, slot) for number, slot in enumerate(slots) if any(p.stage == 0 and p.kind == "F" for p in slot)
        ]

    def _later(self, time: float, row: _Row, slot: int, maker: int | None, sent: float) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, row, slot, maker, sent))

    def _try(self, row: _Row, rank: int, time: float) -> None:
        slot = row.next[rank]
        if row.busy[rank] or slot == self._ends[rank] or row.open[slot]:
            return
        needed = row.last[slot]
        sent, maker = needed or (0.0, None)
        end = time + row.seconds[slot]
        place = None if maker is None else self._needs.places[maker]
        row.found[rank].append(SlotTimes(time, end, sent, place, needed is not None and maker is None))
        row.busy[rank], row.next[rank] = True, slot + 1
        self._later(end, row, slot, slot, time)

    def _over(self, row: _Row, slot: int, time: float) -> None:
        rank = self._rank_of[slot]
        row.busy[rank] = False
        for other, microbatch in self._makes[slot]:
            if self._rank_of[other] == rank:
                self._arrived(row, other, slot, time, time)
            else:
                self._send(row, slot, other, time, row.work[microbatch])
        self._try(row, rank, time)

    def _send(self, row: _Row, slot: int, other: int, time: float, work: float) -> None:
        ranks = self._rank_of[slot], self._rank_of[other]
        if ranks not in row.paths:
            sender, receiver = (self._costs.world_rank(row.number, rank) for rank in ranks)
            row.paths[ranks] = self._costs.network.path(sender, receiver)
        shared, link = row.paths[ranks]
        size = self._costs.message_bytes * work
        begin = max(time, self._links.get(shared, 0.0))
        self._links[shared] = begin + size / link.bytes_per_s
        self._later(begin + link.seconds(size), row, other, slot, time)

    def _arrived(self, row: _Row, slot: int, maker: int | None, sent: float, time: float) -> None:
        row.open[slot] -= 1
        row.last[slot] = (sent, maker)
        if not row.open[slot]:
            self._try(row, self._rank_of[slot], time)


def _stuck(table: ScheduleTable, done: list[int]) -> ConfigError:
    """Make the error of a schedule whose ranks wait for each other in a circle: it names two slots of the circle."""

    def waits_for(rank: int) -> Place:
        """A slot of the schedule that the rank's next one needs, and that is not done."""
        needed = map(table.needs.places.__getitem__, table.needs.needed[table.needs.first[rank] + done[rank]])
        return next(place for place in needed if place[1] >= done[place[0]])

    rank = next(rank for rank, row in enumerate(table.rows) if done[rank] < len(row))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = waits_for(rank)[0]
    circle = seen[seen.index(rank) :]
    lines = []
    for at in circle:
        place = waits_for(at)
        head, needed = table.rows[at][done[at]], table.rows[place[0]][place[1]]
        lines.append(f"rank {at} is at {slot_text(head)}, which waits for {slot_text(needed)} of rank {place[0]}")
    return ConfigError(
        "Schedule table never ends: its passes wait for each other",
        got="\n".join(lines),
        need="an order on each rank in which what a pass waits for is not behind a pass that waits for it",
        try_="another order of the passes that are named, or a schedule of torch's: --schedule 1f1b",
    )

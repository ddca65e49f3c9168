"""When each slot of a schedule's table begins and ends, given what passes and messages cost. No torch.

Events in the order of their time. A rank works through its slots in the table's order; a slot begins once the one
before it is over and all it needs has arrived: a forward pass needs that of the stage before, a backward pass that of
the stage behind and its own forward pass, gradients of weights their backward pass. What another rank has made travels
over a link, on which messages follow each other in the order in which they were made. Sending takes no time of a rank.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tilewright.core.errors import ConfigError
from tilewright.planner.simulate.costs import StepCosts
from tilewright.planner.simulate.table import Place, ScheduleTable, Slot, slot_text


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
    """By row, rank of it, and slot."""

    table: ScheduleTable
    rows: tuple[tuple[tuple[SlotTimes, ...], ...], ...]

    @cached_property
    def passes_s(self) -> float:
        """Until the last pass is over."""
        return max(ranks[-1].end_s for row in self.rows for ranks in row)

    def ends_s(self, rank: int) -> list[float]:
        """When this rank of each row has done its last slot."""
        return [row[rank][-1].end_s for row in self.rows]


def simulate(table: ScheduleTable, costs: StepCosts) -> Timeline:
    """When every slot of every row begins and ends.

    Args:
        table: of a row; all rows have the same.
        costs: of as many stages, ranks and micro-batches.

    Raises:
        ConfigError: slots of the table wait for each other; two that do are named.
    """
    return _Run(table, costs).done()


class _Run:
    """The state of a simulation: what is under way, and what each rank waits for."""

    def __init__(self, table: ScheduleTable, costs: StepCosts) -> None:
        self._table, self._costs, self._needs = table, costs, table.needs
        rows = range(costs.num_rows)
        self._found: list[list[list[SlotTimes]]] = [[[] for _ in table.rows] for _ in rows]
        self._open = [{place: len(needed) for place, needed in self._needs.needed.items()} for _ in rows]
        self._last: list[dict[Place, tuple[float, Place | None]]] = [{} for _ in rows]
        self._busy = [[False] * table.num_ranks for _ in rows]
        self._links: dict[tuple[int, ...], float] = {}
        self._events: list[tuple[float, int, int, Place, Place | None, float]] = []
        """(time, number, row, slot, the slot that made what arrives, when); a slot that is over has itself there."""
        self._count = 0

    def done(self) -> Timeline:
        """Run it to the end."""
        for row, ready in enumerate(self._costs.ready_s):
            for place in self._reads():
                self._open[row][place] += 1
                time = max(ready[one.microbatch] for one in self._slot(place) if one.stage == 0 and one.kind == "F")
                self._later(time, row, place, None, time)
        for row in range(self._costs.num_rows):
            for rank in range(self._table.num_ranks):
                self._try(row, rank, 0.0)
        while self._events:
            time, _, row, place, maker, sent = heapq.heappop(self._events)
            if maker == place:
                self._over(row, place, time)
            else:
                self._arrived(row, place, maker, sent, time)
        done = [len(made) for made in self._found[0]]  # rows have one table: none ends where the first one does not
        if done != [len(slots) for slots in self._table.rows]:
            raise _stuck(self._table, done)
        return Timeline(self._table, tuple(tuple(map(tuple, row)) for row in self._found))

    def _slot(self, place: Place) -> Slot:
        return self._table.rows[place[0]][place[1]]

    def _reads(self) -> list[Place]:
        """Slots that begin with the batch."""
        return [
            (rank, number)
            for rank, row in enumerate(self._table.rows)
            for number, slot in enumerate(row)
            if any(one.stage == 0 and one.kind == "F" for one in slot)
        ]

    def _later(self, time: float, row: int, place: Place, maker: Place | None, sent: float) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, row, place, maker, sent))

    def _try(self, row: int, rank: int, time: float) -> None:
        if self._busy[row][rank]:
            return
        found, slots = self._found[row][rank], self._table.rows[rank]
        place = rank, len(found)
        if place[1] == len(slots) or self._open[row][place]:
            return
        needed = self._last[row].get(place)
        sent, maker = needed or (0.0, None)
        end = time + self._costs.passes.seconds(row, rank, slots[place[1]])
        found.append(SlotTimes(time, end, sent, maker, needed is not None and maker is None))
        self._busy[row][rank] = True
        self._later(end, row, place, place, time)

    def _over(self, row: int, place: Place, time: float) -> None:
        rank = place[0]
        self._busy[row][rank] = False
        for other, microbatch in self._needs.makes.get(place, ()):
            if other[0] == rank:
                self._arrived(row, other, place, time, time)
            else:
                self._send(row, place, other, time, self._costs.passes.work[row][microbatch])
        self._try(row, rank, time)

    def _send(self, row: int, place: Place, other: Place, time: float, work: float) -> None:
        costs = self._costs
        shared, link = costs.network.path(costs.world_rank(row, place[0]), costs.world_rank(row, other[0]))
        size = costs.message_bytes * work
        begin = max(time, self._links.get(shared, 0.0))
        self._links[shared] = begin + size / link.bytes_per_s
        self._later(begin + link.seconds(size), row, other, place, time)

    def _arrived(self, row: int, place: Place, maker: Place | None, sent: float, time: float) -> None:
        self._open[row][place] -= 1
        self._last[row][place] = (sent, maker)
        if not self._open[row][place]:
            self._try(row, place[0], time)


def _stuck(table: ScheduleTable, done: list[int]) -> ConfigError:
    """The two slots of a circle of ranks that wait: each is behind the one that waits for the other."""

    def waits_for(rank: int) -> Place:
        """A slot that the rank's next one needs, and that is not done."""
        return next(place for place in table.needs.needed[rank, done[rank]] if place[1] >= done[place[0]])

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

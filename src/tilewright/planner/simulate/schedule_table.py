"""The order in which each rank of a row passes micro-batches through its stages: a schedule's table. No torch.

A slot of a rank is one pass, or several that it does as one (`dualpipe_v`: a forward and a backward pass). Passes are
written as torch writes them: stage, kind, micro-batch. `F` forward, `B` whole backward, `I` gradient of the input, `W`
gradients of the weights.
"""

import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

from tilewright.core.errors import ConfigError

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
_PASS = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = ")OVERLAP_F_B"
_SKIPPED = re.compile(r"\d*(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


class StagePass(NamedTuple):
    """One pass of one stage for one micro-batch.

    Example:
        >>> str(StagePass(3, "F", 0))
        '3F0'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Slot = tuple[StagePass, ...]
Place = tuple[int, int]
"""Rank of a row, and number of one of its slots."""


def slot_text(slot: Iterable[object]) -> str:
    """A slot as `ScheduleTable.parse` reads it.

    Example:
        >>> slot_text((StagePass(0, "F", 1), StagePass(3, "B", 0)))
        '0F1;3B0'
    """
    return ";".join(map(str, slot))


@dataclass(frozen=True)
class ScheduleTable:
    """Slots by rank of a row.

    Example:
        >>> table = ScheduleTable.parse(["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"])
        >>> table.num_stages, table.num_microbatches, table.rank_of
        (2, 2, (0, 1))
    """

    rows: tuple[tuple[Slot, ...], ...]

    @staticmethod
    def parse(rows: Iterable[str], where: str = "") -> "ScheduleTable":
        """A schedule's table from one line of text per rank, slots separated by commas, passes of a slot by semicolons.

        Empty slots, and torch's entries for communication, are left out: what a pass needs decides when it begins.

        Args:
            rows: of text.
            where: named in errors.

        Raises:
            ConfigError: an entry is no pass, or the table lacks a pass or has one twice.
        """
        table = ScheduleTable(tuple(tuple(_slots(row, f"{where}, rank {rank}")) for rank, row in enumerate(rows)))
        table._check(where)
        return table

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage in a schedule's table."""
        found = {one.stage: rank for rank, row in enumerate(self.rows) for slot in row for one in slot}
        return tuple(found[stage] for stage in sorted(found))

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the row of a schedule's table."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Stages of the model in a schedule's table."""
        return len(self.rank_of)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of a step in a schedule's table."""
        return 1 + max(one.microbatch for row in self.rows for slot in row for one in slot)

    @cached_property
    def needs(self) -> "SlotNeeds":
        """The dependencies between slots of a schedule's table."""
        return SlotNeeds(self)

    def _check(self, where: str) -> None:
        """Check a schedule's table: each stage on one rank; each micro-batch once forward, and once backward, as a
        whole or in two parts."""
        count = Counter(one for row in self.rows for slot in row for one in slot)
        owners: dict[int, set[int]] = {}
        for rank, row in enumerate(self.rows):
            for slot in row:
                for one in slot:
                    owners.setdefault(one.stage, set()).add(rank)
        # 1. Passes that are there twice, stages on two ranks, ranks without work.
        wrong = [f"{one} is there {times} times" for one, times in count.items() if times > 1]
        wrong += [f"stage {stage} is on ranks {sorted(of)}" for stage, of in owners.items() if len(of) > 1]
        wrong += [f"rank {rank} has no pass" for rank, row in enumerate(self.rows) if not row]
        # 2. Passes that are missing: forward, and backward as one pass or as two.
        stages = 1 + max(owners, default=-1)
        last = max((one.microbatch for one in count), default=-1)
        for stage in range(stages):
            for number in range(last + 1):
                have = {kind for kind in KINDS if StagePass(stage, kind, number) in count}
                if have not in ({"F", "B"}, {"F", "I", "W"}):
                    kinds = ", ".join(sorted(have)) or "nothing"
                    wrong.append(f"stage {stage} has {kinds} of micro-batch {number}")
        if wrong or not count:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ConfigError(
                "Schedule table is not a whole step",
                got=("; ".join(wrong[:3]) or "no pass at all") + more,
                need="each stage on one rank; for each of its micro-batches F once, and B once, or I and W once each",
                try_="a table of torch's: `schedule._dump_csv(FILE)`",
                where=where,
            )


class SlotNeeds:
    """The dependencies between slots of a row, in the order of the passes that read it. A slot has its number in the
    whole table, those of the first rank first.

    Args:
        table: of which each pass is there.
    """

    def __init__(self, table: ScheduleTable) -> None:
        sizes = [len(row) for row in table.rows]
        self.ends: list[int] = list(itertools.accumulate(sizes))
        """By rank, the number behind its last slot."""
        self.first = [end - size for end, size in zip(self.ends, sizes, strict=True)]
        """By rank, the number of its first slot."""
        self.places: list[Place] = [(rank, number) for rank, size in enumerate(sizes) for number in range(size)]
        self.rank_of = [rank for rank, _ in self.places]
        """By slot."""
        slots = list(itertools.chain.from_iterable(table.rows))
        numbers = {one: number for number, slot in enumerate(slots) for one in slot}
        self.needed: list[list[int]] = []
        """Slots that make what a slot needs; one that makes two things of it is there twice."""
        self.makes: list[list[tuple[int, int]]] = [[] for _ in slots]
        """Slots that need what a slot makes, and of which micro-batch that is."""
        for here, slot in enumerate(slots):
            found = [(numbers[need], need.microbatch) for one in slot for need in _read_by(one, numbers)]
            self.needed.append([number for number, _ in found if number != here])
            for number, microbatch in found:
                if number != here:
                    self.makes[number].append((here, microbatch))
        self.counts = list(map(len, self.needed))
        """By slot, how many it needs."""


def _read_by(one: StagePass, there: Container[StagePass]) -> Iterator[StagePass]:
    """Passes of a schedule's table whose results a pass reads."""
    stage, kind, number = one
    if kind == "W":
        yield StagePass(stage, "I", number)
    elif kind == "F":
        if stage:
            yield StagePass(stage - 1, "F", number)
    else:
        yield StagePass(stage, "F", number)
        behind = [StagePass(stage + 1, kind, number) for kind in ("B", "I")]
        yield from (need for need in behind if need in there)


def _slots(row: str, where: str) -> Iterable[Slot]:
    for text in row.split(","):
        found = []
        text = text.strip()
        inner = text[1:].removesuffix(_OVERLAP) if text.startswith("(") and text.endswith(_OVERLAP) else text
        for part in filter(None, map(str.strip, inner.split(";"))):
            match = _PASS.fullmatch(part)
            if match:
                found.append(StagePass(int(match[1]), cast(Kind, match[2]), int(match[3])))
            elif not _SKIPPED.fullmatch(part):
                raise ConfigError(
                    "Schedule table has an entry that is no pass",
                    got=repr(part[:40]),
                    need="stage, kind (F, B, I or W) and micro-batch, such as 0F3 or (1F4;2B0)OVERLAP_F_B",
                    try_="a table of torch's: `schedule._dump_csv(FILE)`",
                    where=where,
                )
        if found:
            yield tuple(found)


def rows_text(rows: Iterable[Iterable[Iterable[object]]]) -> list[str]:
    """A schedule's table as text, one line per rank, as `ScheduleTable.parse` reads it."""
    return [",".join(map(slot_text, row)) for row in rows]

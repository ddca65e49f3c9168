"""A rank that does not go on while others wait for it, from the records in the run folder.

Ranks do the same in the same order, so of two the one at an earlier place is waited for: in a collective, now or soon.
Where both are in one phase, and one waits for the other inside of it (shards gather and sum in forward and backward
passes), the collective's own timeout tells: see `failure.Blame`.
"""

from collections.abc import Mapping

from tilewright.parallel.liveness.heartbeat import ENDED, RankRecord

_END = (1 << 62,)
_NOT_BEGUN = (-1,)


class Stalls:
    """Looks at the records again and again.

    Args:
        world: number of ranks. One without a record has not come to its first phase.
        limit_s: how long a rank may stand at one place while another is further. What takes long (`RankRecord.long`)
            may take longer for as long as the process works.
    """

    def __init__(self, world: int, limit_s: float) -> None:
        self._world, self._limit_s = world, limit_s
        self._since: dict[int, tuple[tuple[int, ...], float]] = {}

    def look(self, found: Mapping[int, RankRecord], now: float) -> tuple[RankRecord, float] | None:
        """The rank that has stood still for too long, and the seconds; of several the one that is furthest behind.

        Args:
            found: records by rank.
            now: seconds of a clock that never goes back.
        """
        ranks = [found.get(rank, _missing(rank)) for rank in range(self._world)]
        still = [self._still_s(record, now) for record in ranks]
        furthest = max(_place(record) for record in ranks)
        behind = [
            (_place(record), record.rank)
            for record, seconds in zip(ranks, still, strict=True)
            if seconds >= self._limit_s and not record.end and _place(record) < furthest
        ]
        if not behind:
            return None
        _, worst = min(behind)
        return ranks[worst], still[worst]

    def _still_s(self, record: RankRecord, now: float) -> float:
        progress = (record.pid, *record.progress)
        if record.rank not in self._since or self._since[record.rank][0] != progress:
            self._since[record.rank] = progress, now
        return now - self._since[record.rank][1]


def _place(record: RankRecord) -> tuple[int, ...]:
    """How far a rank has got; in one phase of the run, what its thread beside has done."""
    if record.end == ENDED:
        return _END
    return (*record.place, record.aside_moves) if record.pid else _NOT_BEGUN


def _missing(rank: int) -> RankRecord:
    return RankRecord(rank, "a machine that is not known", 0, phase="start, before its first sign of life")

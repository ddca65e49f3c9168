"""Layers over stages by what they cost and how fast ranks are. No torch.

A rank's time for a micro-batch is that of its stages. The split with the least time of the slowest rank is sought by
moving one layer over one border, or over several borders in a row, for as long as that helps.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitCosts:
    """The costs that a split is made for."""

    layers: Sequence[float]
    """Seconds of each layer for a usual micro-batch, on a rank of speed 1."""
    rank_of: Sequence[int]
    """The rank of each stage."""
    speeds: Sequence[float]
    """Of each rank in the row."""
    first: float = 0.0
    """Seconds of the embedding."""
    last: float = 0.0
    """Seconds of head and loss."""
    most: int | None = None
    """Layers that a rank has memory for; None: any number."""

    def rank_seconds(self, split: Sequence[int]) -> list[float]:
        """Of each rank for a micro-batch.

        Example:
            >>> SplitCosts((1.0,) * 4, rank_of=(0, 1), speeds=(1.0, 0.5)).rank_seconds((3, 1))
            [3.0, 2.0]
        """
        seconds, start = [0.0] * len(self.speeds), 0
        for stage, count in enumerate(split):
            seconds[self.rank_of[stage]] += sum(self.layers[start : start + count])
            start += count
        seconds[self.rank_of[0]] += self.first
        seconds[self.rank_of[-1]] += self.last
        return [of_rank / speed for of_rank, speed in zip(seconds, self.speeds, strict=True)]

    def rated(self, split: Sequence[int]) -> tuple[float, float]:
        """How good a split is, the smaller the better: seconds of the slowest rank, and how unequal ranks are."""
        seconds = self.rank_seconds(split)
        return max(seconds), sum(one * one for one in seconds)

    def _fits(self, split: Sequence[int]) -> bool:
        if min(split) < 1:
            return False
        held = [0] * len(self.speeds)
        for stage, count in enumerate(split):
            held[self.rank_of[stage]] += count
        return self.most is None or max(held) <= self.most


def best_split(costs: SplitCosts, now: Sequence[int]) -> tuple[int, ...]:
    """Layers per stage with the least time of the slowest rank, from a split that is there.

    Args:
        costs: of layers and ranks.
        now: layers per stage.

    Example:
        >>> best_split(SplitCosts((1.0,) * 8, rank_of=(0, 1), speeds=(1.0, 0.6)), now=(4, 4))
        (5, 3)
    """
    split, rated = tuple(now), costs.rated(now)
    while True:
        moves = [
            tuple(count + (stage == giver) * -1 + (stage == taker) for stage, count in enumerate(split))
            for giver in range(len(split))
            for taker in range(len(split))
            if giver != taker
        ]
        found = min(((costs.rated(move), move) for move in moves if costs._fits(move)), default=(rated, split))
        if found[0] >= rated:
            return split
        rated, split = found


@dataclass(frozen=True)
class SplitMove:
    """Another split, and what it is for."""

    split: tuple[int, ...]
    """Layers per stage."""
    before_s: float
    """Of the slowest rank for a micro-batch."""
    after_s: float

    @property
    def gain(self) -> float:
        """Share of the time that it saves."""
        return 1 - self.after_s / self.before_s


def worth(costs: SplitCosts, now: Sequence[int], *, steps_left: int, step_s: float, move_s: float) -> SplitMove | None:
    """The better split where the steps that are left save more than twice what the move takes; None otherwise.

    Args:
        costs: of layers and ranks.
        now: layers per stage.
        steps_left: of the run.
        step_s: seconds of a step.
        move_s: seconds of the move.
    """
    move = SplitMove(best_split(costs, now), max(costs.rank_seconds(now)), 0.0)
    move = SplitMove(move.split, move.before_s, max(costs.rank_seconds(move.split)))
    return move if move.gain >= 0.03 and steps_left * step_s * move.gain > 2 * move_s else None

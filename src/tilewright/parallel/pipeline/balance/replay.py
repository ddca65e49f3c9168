"""A measured step of a pipeline run again on paper: what its passes would have taken without a cause of waiting.

A pass begins once the one before it on its rank is over, and what it needs is there: a forward pass that of the stage
before, a backward pass that of the stage behind, and its own forward pass. The order on each rank is the measured one.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["forward", "backward", "backward of inputs", "backward of weights"]
CAUSES = ("filling and draining", "unequal stages", "unequal micro-batches", "unequal rows", "messages and other")
"""Why ranks are idle: the schedule, with passes of a kind that all take as long; stages or ranks that take longer than
others; micro-batches that do; rows of ranks that wait for the slowest one; all else between passes."""


@dataclass(frozen=True)
class Pass:
    """One pass of a stage, as measured."""

    action: Action
    stage: int
    """Counted from 0."""
    microbatch: int
    """Counted from 0."""
    begin_s: float
    """Since the step's beginning on this rank."""
    seconds: float

    @property
    def end_s(self) -> float:
        """End of a pass to replay, since the step's beginning."""
        return self.begin_s + self.seconds


@dataclass(frozen=True)
class StepPart:
    """A part of a step of a rank beside passes, as measured."""

    name: str
    begin_s: float
    """Since the step's beginning on this rank."""
    seconds: float


Row = Sequence[Sequence[Pass]]
"""Passes of each rank in a row, in their order."""


def busy_s(row: Row) -> float:
    """Seconds in passes of a measured step, over all ranks, for its replay."""
    return math.fsum(one.seconds for of_rank in row for one in of_rank)


def span_s(row: Row) -> float:
    """Seconds of a replayed step from the begin of its first pass to the end of its last one.

    Example:
        >>> span_s([[Pass("forward", 0, 0, 1.0, 2.0)], [Pass("forward", 1, 0, 3.5, 1.0)]])
        3.5
    """
    passes = [one for of_rank in row for one in of_rank]
    return max(one.end_s for one in passes) - min(one.begin_s for one in passes)


def replayed(row: Row, seconds: Callable[[Pass], float] = lambda one: one.seconds) -> list[list[Pass]]:
    """Replayed passes with other seconds, each as early as it can be, and nothing between them.

    Args:
        row: as measured.
        seconds: of each pass.

    Raises:
        ValueError: passes wait for each other in a circle, or one is missing.

    Example:
        >>> row = [[Pass("forward", 0, 0, 0.0, 1.0)], [Pass("forward", 1, 0, 9.0, 2.0)]]
        >>> replayed(row)[1][0].end_s
        3.0
    """
    stages = 1 + max(one.stage for of_rank in row for one in of_rank)
    done: dict[tuple[str, int, int], float] = {}
    found: list[list[Pass]] = [[] for _ in row]
    left = True
    while left:
        left = False
        for rank, of_rank in enumerate(row):
            for one in of_rank[len(found[rank]) :]:
                needs = _needs(one, stages)
                if any(key not in done for key in needs):
                    break
                before = found[rank][-1].end_s if found[rank] else 0.0
                begin = max([before, *(done[key] for key in needs)])
                found[rank].append(replace(one, begin_s=begin, seconds=seconds(one)))
                done[_gives(one)] = found[rank][-1].end_s
                left = True
    if any(len(made) < len(of_rank) for made, of_rank in zip(found, row, strict=True)):
        raise ValueError("passes of a step that wait for each other")
    return found


def _gives(one: Pass) -> tuple[str, int, int]:
    kind = {"forward": "F", "backward of weights": "W"}.get(one.action, "B")
    return kind, one.stage, one.microbatch


def _needs(one: Pass, stages: int) -> list[tuple[str, int, int]]:
    if one.action == "forward":
        return [("F", one.stage - 1, one.microbatch)] if one.stage else []
    if one.action == "backward of weights":
        return [("B", one.stage, one.microbatch)]
    own = ("F", one.stage, one.microbatch)
    return [own, *([("B", one.stage + 1, one.microbatch)] if one.stage + 1 < stages else [])]


@dataclass(frozen=True)
class IdleTime:
    """How much of a step's time its ranks were idle, and why."""

    share: float
    """Of the ranks' time from the first pass to the last one."""
    causes: dict[str, float]
    """Shares, which add up to that."""


def idle_time(rows: Sequence[Row]) -> IdleTime:
    """The idle time of a pipeline's ranks in a measured step, by cause, found by replay.

    Args:
        rows: of ranks.

    Example:
        >>> found = idle_time([[[Pass("forward", 0, 0, 0.0, 1.0)], [Pass("forward", 1, 0, 1.0, 1.0)]]])
        >>> found.share, found.causes["filling and draining"]
        (0.5, 0.5)
    """
    span = max(span_s(row) for row in rows)
    ranks = sum(len(row) for row in rows)
    busy = math.fsum(busy_s(row) for row in rows)
    idle: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    for row in rows:
        work, same, of_stage = busy_s(row) / len(row), _means(row, by_stage=False), _means(row, by_stage=True)
        spans = [work, *(span_s(replayed(row, of)) for of in (same, of_stage)), span_s(replayed(row))]
        shares = [after - before for before, after in itertools.pairwise(spans)]
        shares += [span - span_s(row), span_s(row) - spans[-1]]
        for cause, seconds in zip(CAUSES, shares, strict=True):
            idle[cause] += seconds * len(row) / (ranks * span)
    return IdleTime(1 - busy / (ranks * span), idle)


def beside_s(rows: Sequence[Row]) -> float:
    """The seconds per micro-batch that are not in its passes (messages, the interpreter between them), summed over the
    ranks of a row."""
    microbatches = len({one.microbatch for one in _all(rows[0])})
    between = [span_s(row) - span_s(replayed(row)) for row in rows]
    return max(0.0, math.fsum(between) / len(between)) * len(rows[0]) / microbatches


def _means(row: Row, *, by_stage: bool) -> Callable[[Pass], float]:
    """Mean seconds of the passes of a kind, by stage and over all stages, for a replay."""

    def key(one: Pass) -> tuple[str, int]:
        return one.action, one.stage if by_stage else 0

    found: dict[tuple[str, int], list[float]] = {}
    for one in _all(row):
        found.setdefault(key(one), []).append(one.seconds)
    means = {name: math.fsum(seconds) / len(seconds) for name, seconds in found.items()}
    return lambda one: means[key(one)]


def _all(row: Row) -> Iterable[Pass]:
    return (one for of_rank in row for one in of_rank)

"""A step of a pipeline as all its ranks have measured it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.parallel.pipeline.balance.cost_model import StageWork
from tilewright.parallel.pipeline.balance.fit_costs import StageSeconds
from tilewright.parallel.pipeline.balance.replay import IdleTime, Pass, Row, StepPart, idle_time

FILE = "pipeline.json"
"""Of a run folder: measured steps."""


@dataclass(frozen=True)
class MicroBatchSize:
    """The numbers on which the cost of a micro-batch depends."""

    tokens: int
    """T, with padding."""
    pairs: int
    """Sum of L^2 over its documents."""


@dataclass(frozen=True)
class StageKind:
    """The content of a pipeline stage, as a measured step has it."""

    layers: Mapping[str, int]
    """By kind."""
    first: bool = False
    last: bool = False

    def work(self, size: MicroBatchSize) -> StageWork:
        """The work of a measured stage on a micro-batch."""
        return StageWork(self.layers, size.tokens, size.pairs, self.first, self.last)


@dataclass(frozen=True)
class RankStep:
    """The measurements of one rank in a step of a pipeline."""

    data_rank: int
    row_rank: int
    passes: Sequence[Pass]
    parts: Sequence[StepPart]
    sizes: Sequence[MicroBatchSize]
    """Of its micro-batches."""
    tensor_rank: int = 0
    """Among those that have other parts of the same stages' matrices. Each is in a row of its own."""


@dataclass(frozen=True)
class MeasuredStep:
    """The measured passes of a step, by rank, among all."""

    ranks: Sequence[RankStep]

    @property
    def rows(self) -> list[Row]:
        """Measured passes of a step's ranks in each row."""
        found: dict[tuple[int, int], list[RankStep]] = {}
        for rank in self.ranks:
            found.setdefault((rank.data_rank, rank.tensor_rank), []).append(rank)
        return [[one.passes for one in sorted(row, key=lambda one: one.row_rank)] for row in found.values()]

    def idle(self) -> IdleTime:
        """Divide the idle time of a measured step by cause: the share of the ranks' time that was in no pass, and
        why."""
        return idle_time(self.rows)

    def stage_seconds(self, stages: Mapping[int, StageKind]) -> list[StageSeconds]:
        """Seconds of each micro-batch in each stage of a measured step, over its passes.

        Args:
            stages: what is in them, by number.
        """
        found: dict[tuple[int, int, int], float] = {}
        for number, rank in enumerate(self.ranks):
            for one in rank.passes:
                key = number, one.stage, one.microbatch
                found[key] = found.get(key, 0.0) + one.seconds
        return [
            StageSeconds(stages[stage].work(self.ranks[number].sizes[microbatch]), number, seconds)
            for (number, stage, microbatch), seconds in found.items()
        ]

    def to_json(self) -> list[dict[str, Any]]:
        """Write a measured step as JSON: ranks, each pass as a list of its fields."""
        return [
            {
                "data_rank": rank.data_rank,
                "row_rank": rank.row_rank,
                "tensor_rank": rank.tensor_rank,
                "passes": [
                    [p.action, p.stage, p.microbatch, round(p.begin_s, 6), round(p.seconds, 6)] for p in rank.passes
                ],
                "parts": [[p.name, round(p.begin_s, 6), round(p.seconds, 6)] for p in rank.parts],
                "sizes": [asdict(size) for size in rank.sizes],
            }
            for rank in self.ranks
        ]

    @staticmethod
    def from_json(found: Sequence[Mapping[str, Any]]) -> "MeasuredStep":
        """A measured step from the JSON of `to_json`.

        Raises:
            KeyError, TypeError: it is something else.
        """
        return MeasuredStep(
            [
                RankStep(
                    int(rank["data_rank"]),
                    int(rank["row_rank"]),
                    [Pass(str(a), int(s), int(m), float(b), float(t)) for a, s, m, b, t in rank["passes"]],  # type: ignore[arg-type]
                    [StepPart(str(name), float(begin), float(seconds)) for name, begin, seconds in rank["parts"]],
                    [MicroBatchSize(**size) for size in rank["sizes"]],
                    int(rank.get("tensor_rank", 0)),
                )
                for rank in found
            ]
        )

"""A step to simulate: documents, how they are put into micro-batches, a schedule, ranks and links. From it: the costs.

Documents are put into micro-batches, and layers into stages, by the functions that a run uses
(`parallel.pipeline.balance`).
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tilewright.parallel.pipeline.balance.assign_counts import assigned_work, exact_work
from tilewright.parallel.pipeline.balance.resplit import SplitCosts, best_split, common_split
from tilewright.parallel.pipeline.stage_split import Pipeline
from tilewright.planner.simulate.pass_costs import KindSeconds, Network, PassCosts, StepCosts, by_rank, ready_one_by_one

Packing = Literal["padded", "fixed", "tokens", "cost"]
"""`fixed`: as many documents in each micro-batch, as they come; `padded`: those, as long as the longest of the step;
`tokens`, `cost`: balanced by the tokens of documents, or by what they cost."""
Split = Literal["even", "same", "own"]
"""Layers over stages: as many in each; by the speed of ranks, the same in all rows; or in each row its own, which no
run does today: rows would sum gradients of layers that are on different ranks."""
FINE = 64
"""Layers per stage of a model that can be cut anywhere."""


@dataclass(frozen=True)
class DocumentCosts:
    """The cost of a document, in tokens.

    Example:
        >>> DocumentCosts(attention=4000).of(np.array([1000, 4000])).tolist()
        [1250.0, 8000.0]
    """

    attention: float = math.inf
    """Tokens of a document that spends as long in attention as in all else."""

    def of(self, lengths_N: np.ndarray) -> np.ndarray:
        """A case's cost of each document [N], FP64."""
        return lengths_N + lengths_N.astype(np.float64) ** 2 / self.attention


@dataclass(frozen=True)
class SimulatedCase:
    """The case that is simulated.

    Example:
        >>> SimulatedCase(Pipeline(2), rows=2, count=4, speeds=(1.0, 1.0, 1.0, 0.5)).row_speeds()
        [1.0, 0.5]
    """

    pipeline: Pipeline
    rows: int
    """Copies that read other documents."""
    count: int
    """Micro-batches per row."""
    packing: Packing = "cost"
    by_speed: bool = True
    """A row of a slow rank gets less."""
    split: Split = "even"
    layers: int = 0
    """Of the model; 0: it can be cut anywhere, and evenly."""
    speeds: tuple[float, ...] = ()
    """Of the world's ranks; empty: all the same."""
    documents: DocumentCosts = field(default_factory=DocumentCosts)
    kinds: KindSeconds = field(default_factory=KindSeconds)
    """Of a micro-batch with the mean cost of the step's."""
    message_bytes: float = 0.0
    """Of such a micro-batch."""
    network: Network = field(default_factory=Network)
    data_s: float = 0.0
    """To read a micro-batch."""
    reduce_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def row_of_speeds(self) -> tuple[tuple[float, ...], ...]:
        """The speed of each rank of a case, by row."""
        return by_rank(self.speeds or (1.0,) * (self.rows * self.pipeline.pp), self.rows)

    @property
    def is_even(self) -> bool:
        """True if all ranks of a case have one speed."""
        return len(set(self.speeds)) <= 1

    def splits(self) -> list[tuple[float, ...]]:
        """Layers of each stage by row of a case, as shares of what a rank has of an even split.

        Raises:
            ConfigError: fewer layers than stages.
        """
        if not self.layers and self.split == "even":
            return [(1 / self.pipeline.virtual,) * self.pipeline.num_stages] * self.rows
        layers = self.layers or FINE * self.pipeline.num_stages
        counts = self._layer_counts(layers)
        return [tuple(count * self.pipeline.pp / layers for count in row) for row in counts]

    def _layer_counts(self, layers: int) -> list[tuple[int, ...]]:
        """Layers of each stage of a case, by row."""
        even, rows = tuple(map(len, self.pipeline.split(layers))), self._split_costs(layers)
        if self.split == "even":
            return [even] * self.rows
        if self.split == "own":
            best = {tuple(row.speeds): best_split(row) for row in rows}
            return [best[tuple(row.speeds)] for row in rows]
        return [common_split(rows, even, by_speed=self.by_speed)] * self.rows

    def _split_costs(self, layers: int) -> list[SplitCosts]:
        """Costs of a case's split of layers, by row."""
        rank_of = [self.pipeline.rank_of(stage) for stage in range(self.pipeline.num_stages)]
        return [SplitCosts((1.0,) * layers, rank_of, speeds) for speeds in self.row_of_speeds]

    def row_speeds(self) -> list[float]:
        """The speed of each row of a case: that of its slowest rank, given its layers."""
        found = []
        for shares, speeds in zip(self.splits(), self.row_of_speeds, strict=True):
            load = [0.0] * self.pipeline.pp
            for stage, share in enumerate(shares):
                load[self.pipeline.rank_of(stage)] += share
            found.append(1 / max(one / speed for one, speed in zip(load, speeds, strict=True)))
        return found

    def work(self, lengths_N: np.ndarray) -> list[list[float]]:
        """Costs of the micro-batches of a case's step by row, as those of their documents add up."""
        if self.packing in ("padded", "fixed"):
            each = len(lengths_N) // (self.rows * self.count)
            costs_N = self.documents.of(lengths_N)
            if self.packing == "padded":
                return [[each * float(costs_N.max())] * self.count for _ in range(self.rows)]
            parts = costs_N[: self.rows * self.count * each].reshape(self.rows, self.count, each)
            return [[exact_work(one) for one in row] for row in parts]
        lengths_U, numbers_U = np.unique(lengths_N, return_counts=True)
        work_U = self.documents.of(lengths_U)
        speeds = self.row_speeds() if self.by_speed else [1.0] * self.rows
        costs_U = lengths_U.astype(np.float64) if self.packing == "tokens" else work_U
        return assigned_work(costs_U, numbers_U, work_U, speeds, self.count)

    def costs(self, lengths_N: np.ndarray) -> StepCosts:
        """The costs of a case's step with documents of these lengths, int64 [N]."""
        unit = float(self.documents.of(lengths_N).sum()) / (self.rows * self.count)
        passes = PassCosts(
            self.kinds,
            tuple(tuple(one / unit for one in row) for row in self.work(lengths_N)),
            tuple(self.splits()),
            self.row_of_speeds,
        )
        ready = ready_one_by_one(self.rows, self.count, self.data_s) if self.data_s else ()
        return StepCosts(passes, self.message_bytes, self.network, ready, self.reduce_s, self.optimizer_s)

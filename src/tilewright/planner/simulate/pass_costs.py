"""Costs of passes and of messages between ranks: the given numbers of a simulated step. No torch.

Rows are copies of the pipeline that read other documents. Rank r of a row is rank `r * rows + row` of the world, as in
the mesh of a run: `pp` is its outermost axis.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tilewright.planner.simulate.schedule_table import Kind, Slot, StagePass

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class KindSeconds:
    """Seconds of passes of work 1 through a stage of share 1 on a rank of speed 1.

    Example:
        >>> KindSeconds(forward=1.0, dgrad=1.25, wgrad=0.75).of("B")
        2.0
    """

    forward: float = 1.0
    dgrad: float = 1.0
    """Of the gradient of a stage's input."""
    wgrad: float = 1.0
    """Of the gradients of its weights."""

    def of(self, kind: Kind) -> float:
        """The seconds of a pass of this kind."""
        return self.by_kind[kind]

    @cached_property
    def by_kind(self) -> Mapping[Kind, float]:
        """The seconds of a pass of each kind."""
        return {"F": self.forward, "I": self.dgrad, "W": self.wgrad, "B": self.dgrad + self.wgrad}

    @property
    def total(self) -> float:
        """The seconds of a pass forward and of one backward, together."""
        return self.forward + self.dgrad + self.wgrad


@dataclass(frozen=True)
class PassCosts:
    """Seconds of every pass of a step.

    Example:
        >>> costs = PassCosts.even(rows=1, ranks=2, stages=2, microbatches=3)
        >>> costs.seconds(0, 1, (StagePass(1, "B", 2),))
        2.0
    """

    kinds: KindSeconds
    work: Matrix
    """By row and micro-batch."""
    shares: Matrix
    """By row and stage: of the layers of a rank that has as many as others."""
    speeds: Matrix
    """By row and rank of it."""

    @staticmethod
    def even(*, rows: int, ranks: int, stages: int, microbatches: int, kinds: KindSeconds | None = None) -> "PassCosts":
        """Costs of passes where micro-batches, stages and ranks are equal."""
        return PassCosts(
            kinds or KindSeconds(),
            ((1.0,) * microbatches,) * rows,
            ((ranks / stages,) * stages,) * rows,
            ((1.0,) * ranks,) * rows,
        )

    def seconds(self, row: int, rank: int, slot: Slot) -> float:
        """The seconds of a slot of one rank of a row."""
        return self.of_slots(row, rank, (slot,))[0]

    def of_slots(self, row: int, rank: int, slots: Iterable[Slot]) -> list[float]:
        """The seconds of each of some slots of a rank of a row."""
        work, shares, kinds, speed = self.work[row], self.shares[row], self.kinds.by_kind, self.speeds[row][rank]
        found = []
        for slot in slots:
            one = 0.0
            for stage, kind, microbatch in slot:
                one += kinds[kind] * work[microbatch] * shares[stage]
            found.append(one / speed)
        return found

    def held(self, row: int, one: StagePass) -> float:
        """The activations that a pass keeps for backward, in micro-batches of work 1 through a stage of share 1."""
        return self.work[row][one.microbatch] * self.shares[row][one.stage]

    def even_rows(self) -> "PassCosts":
        """These costs of passes with all micro-batches of a row at the mean of the row."""
        return replace(self, work=tuple((math.fsum(row) / len(row),) * len(row) for row in self.work))

    def equal_rows(self, rank_of: Sequence[int]) -> "PassCosts":
        """Costs of passes where all stages of a row too take as long as the mean of the row's, on ranks of speed 1.

        Args:
            rank_of: of a row that has each stage.
        """
        loads = [
            math.fsum(share / speeds[rank] for share, rank in zip(shares, rank_of, strict=True)) / len(shares)
            for shares, speeds in zip(self.shares, self.speeds, strict=True)
        ]
        return PassCosts(
            self.kinds,
            self.even_rows().work,
            tuple((load,) * len(rank_of) for load in loads),
            tuple((1.0,) * len(row) for row in self.speeds),
        )


@dataclass(frozen=True)
class Link:
    """Seconds of a message are `latency_s` plus its bytes over `bytes_per_s`; messages on a link follow each other.

    Example:
        >>> Link(bytes_per_s=1e9, latency_s=1e-3).seconds(10**9)
        1.001
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Cost of one message in seconds, on a link that is free."""
        return self.latency_s + num_bytes / self.bytes_per_s


Path = tuple[tuple[int, ...], Link]
"""What messages share, and its speed."""


@dataclass(frozen=True)
class Network:
    """Links between the ranks of the world.

    Example:
        >>> network = Network(ranks_per_node=4, intra=Link(9e9), inter=Link(1e9))
        >>> network.path(0, 3)[0] == network.path(0, 2)[0], network.path(0, 4)[0] == network.path(1, 5)[0]
        (False, True)
    """

    ranks_per_node: int = 1
    intra: Link = field(default_factory=Link)
    """Inside a node: one for each pair of ranks and direction."""
    inter: Link = field(default_factory=Link)
    """Out of a node: its ranks share it."""

    def path(self, sender: int, receiver: int) -> Path:
        """The link that a message between ranks takes, for its cost."""
        node = sender // self.ranks_per_node
        if node == receiver // self.ranks_per_node:
            return (sender, receiver), self.intra
        return (node,), self.inter


@dataclass(frozen=True)
class StepCosts:
    """All that a step costs."""

    passes: PassCosts
    message_bytes: float = 0.0
    """Of a micro-batch of work 1 between two stages, in each direction."""
    network: Network = field(default_factory=Network)
    ready_s: Matrix = ()
    """When the rows have read each of their micro-batches, by row and micro-batch; empty: they are there."""
    reduce_s: float = 0.0
    """Of the sum of gradients over rows, after the last backward pass of a stage in all rows."""
    optimizer_s: float = 0.0
    """Of the update, which begins once all gradients are summed: their norm is that of the whole model."""

    @property
    def num_rows(self) -> int:
        """Copies of the pipeline whose costs these are."""
        return len(self.passes.work)

    def world_rank(self, row: int, rank: int) -> int:
        """The number of a rank of a row in the world, for costs by rank."""
        return rank * self.num_rows + row


def ready_one_by_one(rows: int, microbatches: int, each_s: float) -> Matrix:
    """The times at which micro-batches are read: a reader per row takes `each_s` for each and begins with the step.

    Example:
        >>> ready_one_by_one(1, 3, 0.5)
        ((0.5, 1.0, 1.5),)
    """
    return tuple(tuple(each_s * (number + 1) for number in range(microbatches)) for _ in range(rows))


def by_rank(speeds: Sequence[float], rows: int) -> Matrix:
    """Arrange the speeds of the world's ranks by row and rank of it.

    Example:
        >>> by_rank([1.0, 0.8, 1.0, 1.0], rows=2)
        ((1.0, 1.0), (0.8, 1.0))
    """
    return tuple(tuple(speeds[row::rows]) for row in range(rows))

"""What ranks of a run send each other in a step: bytes by collective, and the seconds of that.

    gather    all-gather of a sharded model's parameters, in each micro-batch: before forward, and of layers that are
              resharded once more before backward
    scatter   reduce-scatter of gradients, once a step, or in each micro-batch with `parallel.reduce_each`
    reduce    all-reduce of gradients over copies, once a step: of a rank's part, or of all where nothing is cut

Bytes are of the whole tensor that a collective makes or takes, of gradients as `parallel.grad_sync` sends them, of
parameters as `parallel.param_gather` does (scales, 1/16,384 of a byte per weight, are not counted). Nothing overlaps
with computation: on a CPU both take the same cores. What is agreed on between steps is a few bytes, and not counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from tilewright.core.config.sections.parallel import WireName
from tilewright.parallel.communicate.wire import TILE, row_bytes
from tilewright.planner.cost.operations import Operation
from tilewright.planner.cost.shards import FP32, Shards
from tilewright.planner.model.shape import ModelShape

WIRE_SHARE: dict[WireName, float] = {name: row_bytes(TILE, name) / (FP32 * TILE) for name in get_args(WireName)}
"""Bytes of a gradient that is sent, in those of FP32."""


@dataclass(frozen=True)
class RankSpeed:
    """Bytes a second of the whole tensor that ranks gather, reduce into parts (`scatter`), and reduce whole."""

    gather: float
    scatter: float
    reduce: float


@dataclass(frozen=True)
class RankTraffic:
    """Bytes of a step on one rank."""

    gather: float = 0.0
    scatter: float = 0.0
    reduce: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, shards: Shards, num_micro: int) -> "RankTraffic":
        """Of a model that so many ranks share.

        Args:
            shape: of the model.
            shards: who shares it.
            num_micro: micro-batches of a step.
        """
        copies = shards.ranks // shards.count
        part = shape.weights.part(shards.count)
        sent = WIRE_SHARE[shards.wire]
        reduced = sent * FP32 * part.trained if copies > 1 else 0.0
        if not shards.cut:
            return cls(reduce=reduced)
        rest = (shape.embedding + shape.head).tensors
        layers = float(sum(found.count * found.weights.tensors.travels(shards.count) for found in shape.classes))
        passes = (2 if shards.reshard else 1) * layers + rest.travels(shards.count)
        times = num_micro if shards.reduce_each else 1
        scattered = sent * shape.weights.tensors.gradients(shards.count)
        return cls(num_micro * passes, times * scattered, reduced)

    @property
    def total(self) -> float:
        """Bytes of all collectives."""
        return self.gather + self.scatter + self.reduce

    def sent(self, shards: Shards) -> dict[str, float]:
        """What one rank sends to others, by operation as a run counts it (`parallel.communicate.traffic`).

        Args:
            shards: of the run.

        Example:
            >>> RankTraffic(gather=8.0, scatter=4.0).sent(Shards(ranks=4, count=4, wire="bf16"))
            {'all_gather': 6.0, 'reduce_scatter': 3.0}
        """
        copies = shards.ranks // shards.count
        found = {
            "all_gather": self.gather * (shards.count - 1) / shards.count,
            "reduce_scatter": self.scatter * (shards.count - 1) / shards.count,
            "all_reduce": self.reduce * 2 * (copies - 1) / copies,
        }
        return {name: size for name, size in found.items() if size}

    def operations(self, speed: RankSpeed) -> Iterator[Operation]:
        """What a step waits for, by collective."""
        for group in ("gather", "scatter", "reduce"):
            size = getattr(self, group)
            yield Operation("communication", "communication", "ranks", size / getattr(speed, group), size, group)


def communication(shape: ModelShape, shards: Shards, num_micro: int, speed: RankSpeed | None) -> tuple[Operation, ...]:
    """Operations of a step between ranks: none for one process, and where no speed is known."""
    if speed is None or shards.ranks == 1:
        return ()
    return tuple(RankTraffic.of(shape, shards, num_micro).operations(speed))

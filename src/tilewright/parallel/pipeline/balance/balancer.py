"""The function that gives the documents of a step their places, by a cost model: see `assignment.Assign`.

It is a value: equal ones give equal places, so ranks that have agreed on it agree on every step from then on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilewright.parallel.pipeline.assignment import Assignment, Room
from tilewright.parallel.pipeline.balance.assign import Places, RowShape, WeighedDocuments, choose
from tilewright.parallel.pipeline.balance.cost_model import CostModel


@dataclass(frozen=True)
class Balanced:
    """Places of documents by what they cost.

    Example:
        >>> balance = Balanced(CostModel(("dense",), (1.0, 0.1, 0.0, 0.0, 0.0)), (("dense", 2),), (1.0,), RowShape(2))
        >>> [part.tolist() for part in balance(np.array([9, 1, 5, 4]), Room(1, 12, lambda count: count == 2))[0]]
        [[1, 2, 3], [0]]
    """

    model: CostModel
    layers: tuple[tuple[str, int], ...]
    """Of the whole model: kind and number."""
    speeds: tuple[float, ...]
    """Of each data rank, relative to each other."""
    row: RowShape
    each_s: float = 0.0
    """What a micro-batch costs beside its passes, over all ranks in a row."""
    count: int = 0
    """Micro-batches of a step that are kept where little is to be had by another number; 0: none."""

    def __call__(self, lengths_N: np.ndarray, room: Room) -> Assignment:
        """Balance documents over ranks by cost; returns their indices by data rank and micro-batch.

        Args:
            lengths_N: tokens of each document, in stream order.
            room: what micro-batches may be.
        """
        costs_N = self.costs(lengths_N)
        documents = WeighedDocuments(lengths_N.tolist(), costs_N.tolist())
        each_s = self.each_s + self.row.stages * self.model.each_s
        return as_arrays(choose(documents, self.speeds, room, self.row, each_s=each_s, now=self.count))

    def costs(self, lengths_N: np.ndarray) -> np.ndarray:
        """Predict the seconds of each document in the whole model, FP64 [N]."""
        layers = dict(self.layers)
        one = self.model.document(layers, 1, first=True, last=True)
        per_pair = sum(
            self.model.coefficients[2 * i + 1] * layers.get(kind, 0) for i, kind in enumerate(self.model.kinds)
        )
        lengths = lengths_N.astype(np.float64)
        return (one - per_pair) * lengths + per_pair * (lengths * lengths)

    def differs(self, other: "Balanced", lengths_N: np.ndarray, least: float) -> float:
        """How much of a step's cost lies elsewhere by another balancer, where it is more than `least`; else 0."""
        mine, theirs = self.costs(lengths_N), other.costs(lengths_N)
        by_cost = float(np.abs(mine / mine.sum() - theirs / theirs.sum()).sum() / 2)
        by_rank = max(abs(a / b - 1) for a, b in zip(_shares(self.speeds), _shares(other.speeds), strict=True))
        found = max(by_cost, by_rank)
        return found if found > least else 0.0

    def at_count(self, count: int) -> "Balanced":
        """The balancer's places of documents with the number of micro-batches fixed."""
        return replace(self, count=count)

    def to_json(self) -> dict[str, Any]:
        """The balancer's state in JSON types, for the state of a run."""
        return {"model": self.model.to_json(), "speeds": list(self.speeds), "each_s": self.each_s, "count": self.count}

    def from_json(self, found: Mapping[str, Any]) -> "Balanced":
        """This balancer with what `to_json` gave; with as many data ranks as this one has, its own speeds otherwise."""
        model = CostModel.from_json(found["model"])
        if model.kinds != self.model.kinds:
            return self
        speeds = tuple(found["speeds"]) if len(found["speeds"]) == len(self.speeds) else self.speeds
        return replace(self, model=model, speeds=speeds, each_s=found["each_s"], count=found["count"])


def as_arrays(places: Places) -> Assignment:
    """The balancer's places as the stream takes them."""
    return tuple(tuple(np.array(one, np.int64) for one in rank) for rank in places)


def _shares(speeds: tuple[float, ...]) -> list[float]:
    return [speed / sum(speeds) for speed in speeds]

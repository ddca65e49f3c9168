"""The cost of the passes of a stage: a * T + b * (sum of L^2) per kind of layer, and terms for embedding, loss and
pass.

T is the tokens of a micro-batch, L the length of each of its documents: attention over documents costs L^2 for each.
Seconds are those of the forward and backward passes of one micro-batch through one stage, on a rank of speed 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StageWork:
    """The work of a pipeline stage for one micro-batch.

    Example:
        >>> StageWork({"dense": 3}, tokens=10, pairs=52, first=True).features(["dense"])
        [30.0, 156.0, 10.0, 0.0, 1.0]
    """

    layers: Mapping[str, int]
    """Its layers by kind."""
    tokens: int
    """T, with padding."""
    pairs: int
    """Sum of L^2 over the documents."""
    first: bool = False
    """It has the embedding."""
    last: bool = False
    """It has the head and the loss."""

    def features(self, kinds: Sequence[str]) -> list[float]:
        """The factor of each coefficient of a `CostModel` in the cost of a stage's work."""
        of_layers = [float(self.layers.get(kind, 0) * times) for kind in kinds for times in (self.tokens, self.pairs)]
        return [*of_layers, float(self.first * self.tokens), float(self.last * self.tokens), 1.0]


@dataclass(frozen=True)
class CostModel:
    """Cost model of a stage's passes: seconds from tokens and lengths of documents.

    Example:
        >>> model = CostModel(("dense",), (1e-3, 1e-6, 2e-3, 3e-3, 5e-3))
        >>> round(model.seconds(StageWork({"dense": 2}, tokens=100, pairs=5000, last=True)), 4)
        0.515
        >>> model.document({"dense": 2}, length=100) > 2 * model.document({"dense": 2}, length=50)
        True
    """

    kinds: tuple[str, ...]
    """Of layers."""
    coefficients: tuple[float, ...]
    """Per kind those of T and of the sum of L^2; then of T in the embedding, of T in head and loss, of a pass."""

    def seconds(self, work: StageWork) -> float:
        """Cost of a stage in seconds for one micro-batch."""
        return sum(c * x for c, x in zip(self.coefficients, work.features(self.kinds), strict=True))

    def document(self, layers: Mapping[str, int], length: int, *, first: bool = False, last: bool = False) -> float:
        """Cost in seconds of one document in these layers, without what a pass costs beside it."""
        return self.seconds(StageWork(layers, length, length * length, first, last)) - self.each_s

    @property
    def each_s(self) -> float:
        """Cost in seconds of a pass beside its documents."""
        return self.coefficients[-1]

    def to_json(self) -> dict[str, Any]:
        """The cost model's numbers in JSON types, for the state of a run."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "CostModel":
        """The cost model from the result of `to_json`."""
        return CostModel(tuple(found["kinds"]), tuple(found["coefficients"]))


def names_of(kinds: Sequence[str]) -> list[str]:
    """Names of the cost model's coefficients, for a reader.

    Example:
        >>> names_of(["dense"])
        ['dense, per token', 'dense, per token pair', 'embedding, per token', 'head and loss, per token', 'per pass']
    """
    of_layers = [f"{kind}, per {what}" for kind in kinds for what in ("token", "token pair")]
    return [*of_layers, "embedding, per token", "head and loss, per token", "per pass"]

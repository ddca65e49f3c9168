"""Costs of a step as two lists: what runs on which stream for how long (`Operation`), and what is where (`Holding`).

Seconds of a plan, by part and in all, are sums of operations; bytes of its phases, by owner and in all, are sums of
holdings. A visit is what runs together: all micro-batches forward through a layer, or backward. Inside a visit streams
overlap; visits come one after the other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from tilewright.core.config.recipe import Tier

Stream = Literal["compute", "fetch", "store", "ranks"]
"""The device's arithmetic, its link in both directions, and the network between ranks, which nothing overlaps yet."""
PARTS = ("matmuls", "attention", "elementwise", "quantize", "calls", "recompute", "weights", "optimizer", "link")
"""Of a layer's seconds. `link`: what crosses the link and is not hidden."""
HEAD = "head"
"""The row of the head, and the visit that makes logits and loss."""
HIDDEN_SHARE = 0.02
"""Of the time of a transfer that is hidden behind computation, what it costs all the same (guess): of plans that are
equally fast on paper, the one that moves less."""


class Operation(NamedTuple):
    """One kind of work of a step on a stream, all micro-batches together."""

    visit: str
    part: str
    stream: Stream
    seconds: float
    bytes: float = 0.0
    """What crosses the link or the network."""
    group: str = ""
    """The collective between ranks: gather, scatter, reduce or exchange."""

    def scaled(self, time: float) -> "Operation":
        """This operation of a step, on its stream, in `time` times the seconds."""
        return self._replace(seconds=self.seconds * time)


Life = Literal["always", "kept", "gradients", "forward", "backward", "once"]
"""How long bytes of a layer are there. `kept`: from forward to backward; `gradients`: from there to the update;
`forward`, `backward`: while the layer runs, one layer at a time; `once`: always, and of all layers like it together."""


class Holding(NamedTuple):
    """Bytes that a layer holds: in which tier, and in which phases."""

    owner: str
    """As `cost.owners` has them."""
    life: Life
    bytes: float
    place: Tier = "device"
    """A CPU's host is its device."""


def computed(visit: str, parts: Mapping[str, float], times: int = 1) -> Iterator[Operation]:
    """Operations of the computation of a layer's visit, from the seconds of its parts in one micro-batch, `times`
    times."""
    return (Operation(visit, part, "compute", times * seconds) for part, seconds in parts.items())


def total_s(operations: Iterable[Operation]) -> float:
    """Seconds of a step's operations over all visits; of a visit those of its computation, or of what crosses the link
    meanwhile where that takes longer, each direction for itself."""
    return sum(sum(one) for one in _visits(operations))


def by_part(operations: Sequence[Operation]) -> dict[str, float]:
    """Seconds of a step's operations, summed by part."""
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for one in operations:
        if one.stream in ("compute", "ranks"):
            found[one.part] = found.get(one.part, 0.0) + one.seconds
    found["link"] = sum(link for _, link, _ in _visits(operations))
    return found


def _visits(operations: Iterable[Operation]) -> Iterator[tuple[float, float, float]]:
    """Divide the operations of a step by visit: computation, transfers that it does not hide, and waiting for other
    ranks."""
    visits: dict[str, dict[Stream, float]] = {}
    for one in operations:
        streams = visits.setdefault(one.visit, {"compute": 0.0, "fetch": 0.0, "store": 0.0, "ranks": 0.0})
        streams[one.stream] += one.seconds
    for streams in visits.values():
        compute, links = streams["compute"], (streams["fetch"], streams["store"])
        hidden = HIDDEN_SHARE * sum(min(compute, one) for one in links)
        yield compute, max(0.0, *(one - compute for one in links)) + hidden, streams["ranks"]

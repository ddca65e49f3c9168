"""Where the units of a kind are in the tensors of a model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tilewright.compress.prune.unit_kinds import Count, Kind

ROUTER_BIAS = "e_score_correction_bias"
"""End of the name of a router's bias per expert, which takes part in the choice alone."""
Place = tuple[int, ...]
"""The numbers in a tensor's name: of its layer, and of its expert where experts are modules. Units are chosen apart
for each."""


@dataclass(frozen=True)
class Share:
    """Units along a dimension of one tensor."""

    tensor: str
    dim: int
    parts: int = 1
    """The dimension is so many runs of all units, such as gate and up projection in one matrix."""
    width: int = 1
    """Consecutive numbers that belong to one unit, in each run."""

    def index(self, units: Tensor, count: int) -> Tensor:
        """The places of some of `count` units are in the dimension, in their order.

        Example:
            >>> Share("gate_up", 0, parts=2).index(torch.tensor([0, 2]), 3)
            tensor([0, 2, 3, 5])
            >>> Share("q", 0, width=2).index(torch.tensor([0, 2]), 3)
            tensor([0, 1, 4, 5])
        """
        inner = (units[:, None] * self.width + torch.arange(self.width)).flatten()
        return (torch.arange(self.parts)[:, None] * (count * self.width) + inner).flatten()


@dataclass(frozen=True)
class UnitGroup:
    """All units of a kind.

    Args:
        kind: of what.
        count: how many a layer has, and the shape with fewer.
        shares: where they are in tensors, by place.
        listed: of units that are modules: the list, by place; its name ends before the number.
        parts: how many of a place are one of `count`, where they are chosen one by one; 1 where it is not there.
    """

    kind: Kind
    count: Count
    shares: Mapping[Place, tuple[Share, ...]]
    listed: Mapping[Place, str]
    parts: Mapping[Place, int] = field(default_factory=dict)

    def size(self, place: Place) -> int:
        """How many units are chosen from at a place."""
        return self.count.units * self.parts.get(place, 1)

    @property
    def places(self) -> tuple[Place, ...]:
        """The places where units are chosen apart."""
        return tuple(sorted({**dict.fromkeys(self.shares), **dict.fromkeys(self.listed)}))


def place_of(name: str) -> Place:
    """The place of units by the numbers in a tensor's name.

    Example:
        >>> place_of("model.layers.3.mlp.experts.11.up_proj.weight")
        (3, 11)
    """
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def stored(model: nn.Module) -> dict[str, Tensor]:
    """Tensors in which units may have places: parameters and persistent buffers, tied ones by their first name only."""
    seen: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if seen.setdefault(id(tensor), name) == name}

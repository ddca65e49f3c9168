"""Axes of the mesh over a run's ranks, and how many ranks each has. No torch in here.

| axis | its ranks | read |
|---|---|---|
| `pp` | hold other layers of a copy | the same rows |
| `dp_replicate` | hold another copy of the model | other rows |
| `dp_shard` | hold other shards of a copy (FSDP2) | other rows |
| `tp` | hold other rows or columns of each matrix | the same rows |

`ep` is no axis of its own: it is a second view of the ranks of `dp_shard` and `tp`, of which `ep` hold other experts.
"""

from dataclasses import dataclass, replace
from math import gcd, prod

from tilewright.core.config.recipe import ParallelSection
from tilewright.core.config.sections.parallel import EXPERT_SHARDS
from tilewright.core.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Outermost first: ranks of the last one have neighbouring numbers."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Along which ranks read other rows."""
MODEL_AXES = ("pp", "dp_shard", "tp")
"""Along which ranks hold other parts of one copy."""
REST = -1
"""As many ranks as the other axes leave."""


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Ranks along each axis of a mesh. `dp_shard` may be `REST` until `fill`.

    Example:
        >>> MeshSizes(dp_shard=2, tp=4).world, MeshSizes(dp_replicate=2, dp_shard=2, tp=2).data
        (8, 4)
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1

    @staticmethod
    def of(section: ParallelSection) -> "MeshSizes":
        """The mesh sizes that a recipe asks for."""
        return MeshSizes(**{axis: getattr(section, axis) for axis in (*AXES, "ep")})

    @property
    def world(self) -> int:
        """Number of all ranks of the mesh."""
        return self._along(AXES)

    @property
    def data(self) -> int:
        """Number of ranks of the mesh that read different rows, counting those that read the same rows once."""
        return self._along(DATA_AXES)

    @property
    def model(self) -> int:
        """Number of ranks of the mesh that hold one copy of the model."""
        return self._along(MODEL_AXES)

    @property
    def experts(self) -> dict[str, int]:
        """The mesh's second view, by axis: `dp_shard` x `tp` as `efsdp` x `ep`.

        Example:
            >>> MeshSizes(dp_shard=4, tp=2, ep=4).experts
            {'pp': 1, 'dp_replicate': 1, 'efsdp': 2, 'ep': 4}
        """
        dense = self.dp_shard * self.tp
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, EXPERT_SHARDS: dense // self.ep, "ep": self.ep}

    def fill(self, world: int) -> "MeshSizes":
        """These mesh sizes filled up for `world` ranks.

        Raises:
            ConfigError: the product of the axes is not the number of ranks, or `ep` does not divide `dp_shard` x `tp`.

        Example:
            >>> MeshSizes(dp_replicate=2, dp_shard=REST).fill(8)
            MeshSizes(pp=1, dp_replicate=2, dp_shard=4, tp=1, ep=1)
        """
        others = prod(getattr(self, axis) for axis in AXES if axis != "dp_shard")
        sizes = replace(self, dp_shard=world // others) if self.dp_shard == REST else self
        if sizes.world != world:
            raise ConfigError(
                "Mesh that does not fit the number of processes",
                got=f"{self}, and {world} processes",
                need=f"{' x '.join(self._shown)} = number of processes",
                try_=self._fitting(world),
            )
        if sizes.dp_shard * sizes.tp % sizes.ep:
            raise ConfigError(
                "Experts that do not come out even over the mesh",
                got=f"ep = {sizes.ep}, {sizes}",
                need="an ep that divides dp_shard x tp: experts are spread over these ranks",
                try_=f"--parallel.ep {gcd(sizes.dp_shard * sizes.tp, sizes.ep)}",
            )
        return sizes

    def _fitting(self, world: int) -> str:
        if self.pp == 1:
            return f"--parallel.dp_replicate 1 --parallel.dp_shard -1 for {world} shards"
        pp = next(pp for pp in range(min(self.pp, world), 0, -1) if world % pp == 0)
        return f"--parallel.pp {pp} --parallel.dp_replicate 1 --parallel.dp_shard -1 for {world // pp} shards per stage"

    def __str__(self) -> str:
        """The axes of the mesh that are used.

        Example:
            >>> str(MeshSizes(dp_shard=REST)), str(MeshSizes(tp=2))
            ('dp_replicate = 1, dp_shard = what is left', 'dp_replicate = 1, dp_shard = 1, tp = 2')
        """
        sizes = {axis: getattr(self, axis) for axis in self._shown}
        return ", ".join(f"{axis} = {'what is left' if size == REST else size}" for axis, size in sizes.items())

    @property
    def _shown(self) -> list[str]:
        return [axis for axis in AXES if axis in DATA_AXES or getattr(self, axis) != 1]

    def _along(self, axes: tuple[str, ...]) -> int:
        return prod(getattr(self, axis) for axis in axes)

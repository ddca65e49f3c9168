"""The processes of a run: who this one is, and the groups over which each component reduces.

`World` is made once, at the start of a run, and handed down as an argument. No component asks for the default group. A
run of one process has `World.alone()`: no group, no mesh, and what takes a group gets None and adds nothing.

Axes of the mesh, outermost first: `dp_replicate` (copies of the model), `dp_shard` (FSDP2: parameters, gradients and
optimizer states in parts). Both see different data, so losses, token counts and decisions are reduced over both. Not
there yet, and refused by the recipe above 1: `tp` (tensors), `ep` (experts), `pp` (pipeline stages), `cp` (context).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilewright.core.env import Ranks
from tilewright.core.errors import ConfigError
from tilewright.parallel.liveness.heartbeat import Heartbeat
from tilewright.parallel.meeting import Meeting

REPLICATE, SHARD = "dp_replicate", "dp_shard"


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard

    @staticmethod
    def fill(dp_replicate: int, dp_shard: int, world: int) -> "MeshSizes":
        """Sizes for `world` ranks; a `dp_shard` of -1 takes what `dp_replicate` leaves.

        Raises:
            ConfigError: the product of the axes is not the number of ranks.

        Example:
            >>> MeshSizes.fill(2, -1, 8)
            MeshSizes(dp_replicate=2, dp_shard=4)
        """
        left = world // dp_replicate if world % dp_replicate == 0 else 0
        sizes = MeshSizes(dp_replicate, left if dp_shard == -1 else dp_shard)
        if sizes.world != world:
            shown = "what is left" if dp_shard == -1 else dp_shard
            raise ConfigError(
                "Mesh that does not fit the number of processes",
                got=f"dp_replicate = {dp_replicate}, dp_shard = {shown}, and {world} processes",
                need="dp_replicate x dp_shard = number of processes",
                try_=f"--parallel.dp_replicate 1 --parallel.dp_shard -1 for {world} shards",
            )
        return sizes


@dataclass(frozen=True)
class World:
    """The processes of a run, as seen by one of them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the processes of this machine: its GPU."""
    local_size: int = 1
    """Processes on this machine, which share its cores and memory."""
    sizes: MeshSizes = MeshSizes()
    mesh: DeviceMesh | None = None
    """Of two axes, `dp_replicate` and `dp_shard`; None for one process."""
    control_group: dist.ProcessGroup | None = None
    """All ranks, over gloo: for decisions, and for what is on the host. None for one process."""
    waiting_group: dist.ProcessGroup | None = None
    """All ranks, over gloo and with a patience of days: for work of one rank that the others wait for. Call `waits`
    before. None for one process."""
    timeout_s: float = 0.0
    """For which ranks wait for each other."""
    meeting: Meeting | None = None
    """Where ranks meet without a group."""
    heartbeat: Heartbeat | None = None
    """This rank's, once there is a run folder."""

    @staticmethod
    def alone() -> "World":
        """One process: no groups."""
        return World()

    def of(self, device: str) -> str:
        """A device's name, and how many processes share the work, for a user.

        Example:
            >>> World(size=4, sizes=MeshSizes(2, 2)).of("CPU"), World.alone().of("CPU")
            ('CPU (4 processes: 2 copies in 2 shards)', 'CPU')
        """
        if self.size == 1:
            return device
        copies = f"{self.sizes.dp_replicate} cop{'ies' if self.sizes.dp_replicate > 1 else 'y'}"
        shards = f" in {self.sizes.dp_shard} shards" if self.sizes.dp_shard > 1 else ""
        return f"{device} ({self.size} processes: {copies}{shards})"

    @property
    def is_first(self) -> bool:
        """Whether this process prepares data, plans, writes the run folder and prints."""
        return self.rank == 0

    def at(self, phase: str) -> None:
        """This rank begins a phase of the start of a run."""
        if self.heartbeat is not None:
            self.heartbeat.phase(phase)

    def begin(self, phase: str) -> None:
        """The same, of another start: steps may be counted from an earlier one on again."""
        if self.heartbeat is not None:
            self.heartbeat.begin(phase)

    def waits(self) -> None:
        """This rank has done its part of the phase and waits for others, for as long as they work."""
        if self.heartbeat is not None:
            self.heartbeat.waits()

    def works(self) -> None:
        """It goes on with the phase."""
        if self.heartbeat is not None:
            self.heartbeat.works()

    def aside(self, phase: str) -> None:
        """A thread has done its part of what ranks do beside the steps, and waits for others."""
        if self.heartbeat is not None:
            self.heartbeat.aside(phase)

    def wait_for_all(self) -> None:
        """Return once all ranks have come here, however long each of them works before."""
        if self.waiting_group is not None:
            self.waits()
            dist.barrier(group=self.waiting_group)
            self.works()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Ranks that read different data, in order: all of them. None for one process."""
        return None if self.mesh is None else dist.group.WORLD

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same shard; None where each shard is held once."""
        if self.mesh is None or self.sizes.dp_replicate == 1:
            return None
        return self.mesh[REPLICATE].get_group()

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the parts of one copy; None where the model is not sharded."""
        if self.mesh is None or self.sizes.dp_shard == 1:
            return None
        return self.mesh[SHARD].get_group()

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """What `fully_shard` takes: two axes for HSDP, one for FSDP; None where the model is not sharded."""
        if self.mesh is None or self.sizes.dp_shard == 1:
            return None
        return self.mesh if self.sizes.dp_replicate > 1 else self.mesh[SHARD]


def join(ranks: Ranks, sizes: MeshSizes, device: torch.device, timeout: timedelta | None = None) -> World:
    """This process's place in an initialised `torch.distributed`.

    Args:
        ranks: what torchrun says of this process.
        sizes: of the mesh; their product is the number of processes.
        device: of the model; its type is the mesh's.
        timeout: of collectives in all groups; None leaves what they have.
    """
    if sizes.world == 1:
        return World.alone()
    shape = (sizes.dp_replicate, sizes.dp_shard)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=(REPLICATE, SHARD))
    seconds = 0.0
    if timeout is not None:
        seconds = timeout.total_seconds()
        for group in (dist.group.WORLD, *mesh.get_all_groups()):
            assert group is not None, "it is initialised"
            group.set_timeout(timeout)  # those of a mesh would have half an hour
    size, local = dist.get_world_size(), (ranks.local_rank, ranks.local_world)
    return World(dist.get_rank(), size, *local, sizes, mesh, timeout_s=seconds)

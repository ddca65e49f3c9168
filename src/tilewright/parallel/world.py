"""The processes of a run: who this one is, and groups by their meaning, of which each component takes its own.

| group | its ranks | for |
|---|---|---|
| `data` | read other rows; one place on the other axes | which rows; sums of losses, counts, gradients |
| `model` | hold one copy of the model together | names and tensors of the whole model |
| `row` | hold other layers of it, and read the same rows | the residual stream; norms of gradients |
| `tensor` | hold other rows or columns of its matrices, and read the same rows | partial sums of layers |
| `experts` | hold other experts of it, and read other rows | rows of tokens; norms of experts' gradients |
| `everyone` | all | decisions: memory, stops, what is written |

`World` is made once, at the start of a run, and handed down as an argument. No component asks for the default group. A
run of one process has `World.alone()`: no groups, no mesh, and what takes a group gets None and adds nothing. FSDP2's
ranks are in both `data` and `model`: they read other rows and hold other shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilewright.core.config.sections.parallel import EXPERT_SHARDS
from tilewright.core.env import Ranks
from tilewright.parallel.communicate.traffic import AxisTraffic, TrafficCounter
from tilewright.parallel.liveness.heartbeat import Heartbeat
from tilewright.parallel.liveness.rendezvous import Meeting
from tilewright.parallel.mesh import AXES, DATA_AXES, MODEL_AXES, MeshSizes

PATIENCE = timedelta(days=7)
"""How long ranks wait for work of unknown length that one of them does, such as preparing data. Who does not go on with
it is seen in its record (`liveness.rank_failure`). Below the 25 days that 32 bits of milliseconds hold, should a
backend count in them."""


@dataclass(frozen=True)
class Group:
    """A group of ranks that a component exchanges something with."""

    rank: int = 0
    """This process's place among them."""
    size: int = 1
    handle: dist.ProcessGroup | None = None
    """None where this process is alone: there is nothing to exchange."""
    traffic: AxisTraffic = field(default_factory=lambda: AxisTraffic(TrafficCounter(), ""), compare=False, kw_only=True)
    """Counts what is exchanged; by default a counter of this group alone."""


@dataclass(frozen=True)
class World:
    """The processes of a run, as seen by one of them."""

    everyone: Group = Group()
    """All ranks, over gloo: for decisions, and for what is on the host."""
    data: Group = Group()
    """Ranks that read different rows."""
    model: Group = Group()
    """Ranks that hold one copy of the model."""
    row: Group = field(default=Group(), kw_only=True)
    """Ranks that hold other layers (`pp`)."""
    tensor: Group = field(default=Group(), kw_only=True)
    """Ranks that hold other parts of matrices (`tp`)."""
    experts: Group = field(default=Group(), kw_only=True)
    """Ranks that hold other experts (`ep`)."""
    local_rank: int = 0
    """Among the processes of this machine: its GPU."""
    local_size: int = 1
    """Processes on this machine, which share its cores and memory."""
    sizes: MeshSizes = field(default_factory=MeshSizes)
    mesh: DeviceMesh | None = None
    """By axis name: `dp_replicate`, `dp_shard`, and other axes of more than one rank. None for one process."""
    expert_mesh: DeviceMesh | None = None
    """The second view of the same ranks, see `MeshSizes.experts`; None where experts are like everything else."""
    waiting_group: dist.ProcessGroup | None = None
    """All ranks, over gloo and with a timeout of a week: for work of one rank that the others wait for. Call `waits`
    before. None for one process."""
    timeout_s: float = 0.0
    """For which ranks wait for each other."""
    meeting: Meeting | None = None
    """Where ranks meet without a group."""
    heartbeat: Heartbeat | None = None
    """This rank's, once there is a run folder."""

    traffic: TrafficCounter = field(default_factory=TrafficCounter, compare=False, kw_only=True)
    """What this rank sends to others."""
    copies_apart: bool = field(default=False, kw_only=True)
    """Whether copies of a shard are summed by a communicator, and not by FSDP2, which then knows shards alone."""

    @staticmethod
    def alone() -> "World":
        """Make the world of one process, which has no groups."""
        return World()

    @property
    def rank(self) -> int:
        """This process's rank in the world, among all of the run."""
        return self.everyone.rank

    @property
    def size(self) -> int:
        """The number of processes of the run."""
        return self.everyone.size

    @property
    def part(self) -> int:
        """This rank's number in the world among those that read the same rows, which hold other parts of the model.

        Example:
            >>> [World(Group(rank, 4), sizes=MeshSizes(dp_shard=2, tp=2)).part for rank in range(4)]
            [0, 1, 0, 1]
        """
        sizes = self.sizes
        return self.rank // (sizes.data * sizes.tp) * sizes.tp + self.rank % sizes.tp

    def of(self, device: str) -> str:
        """Describe the world for a user: a device's name, and how many processes share the work.

        Example:
            >>> World(Group(size=4), sizes=MeshSizes(dp_replicate=2, dp_shard=2)).of("CPU"), World.alone().of("CPU")
            ('CPU (4 processes: 2 copies in 2 shards)', 'CPU')
        """
        if self.size == 1:
            return device
        copies = f"{self.sizes.dp_replicate} cop{'ies' if self.sizes.dp_replicate > 1 else 'y'}"
        shards = f" in {self.sizes.dp_shard} shards" if self.sizes.dp_shard > 1 else ""
        others = [f", {axis} = {size}" for axis in ("tp", "pp", "ep") if (size := getattr(self.sizes, axis)) > 1]
        return f"{device} ({self.size} processes: {copies}{shards}{''.join(others)})"

    @property
    def is_first(self) -> bool:
        """True if this process is the world's first, which prepares data, plans, writes the run folder and prints."""
        return self.rank == 0

    def at(self, phase: str) -> None:
        """Record in the world's heartbeat that this rank begins a phase of the start of a run."""
        if self.heartbeat is not None:
            self.heartbeat.phase(phase)

    def begin(self, phase: str) -> None:
        """Begin the world's start again: ranks are in a phase of it, and steps may be counted from an earlier one on
        again."""
        if self.heartbeat is not None:
            self.heartbeat.begin(phase)

    def waits(self) -> None:
        """This rank of the world has done its part of the phase and waits for others, for as long as they work."""
        if self.heartbeat is not None:
            self.heartbeat.waits()

    def works(self) -> None:
        """This rank of the world continues with the phase of the start."""
        if self.heartbeat is not None:
            self.heartbeat.works()

    def aside(self, phase: str) -> None:
        """A thread of the world's rank has done its part of what ranks do beside the steps, and waits for others."""
        if self.heartbeat is not None:
            self.heartbeat.aside(phase)

    def wait_for_all(self) -> None:
        """Wait until all ranks of the world have come here, however long each of them works before."""
        if self.waiting_group is not None:
            self.waits()
            dist.barrier(group=self.waiting_group)
            self.works()

    @property
    def holds_parts(self) -> bool:
        """True if ranks of the world hold parts of the model: of its tensors, or of its layers."""
        return self.sizes.pp > 1 or self.sizes.tp > 1 or self.fsdp_mesh is not None

    @property
    def fsdp_mesh(self) -> DeviceMesh | None:
        """The world's mesh for `fully_shard`: two axes for HSDP, one for FSDP; None where the model is not sharded.
        Copies of matrices that are cut are of one shard at least: FSDP2 sums their gradients."""
        sizes = self.sizes
        sharded = sizes.dp_shard > 1 or (sizes.dp_replicate > 1 and sizes.tp > 1)
        return self._shards if self.mesh is not None and sharded else None

    def fsdp_mesh_beside(self, experts: bool) -> DeviceMesh | None:
        """The world's mesh of FSDP2 for the rest of a model whose experts have a mesh of their own: the rest may be in
        one shard then."""
        return self._shards if experts and self.mesh is not None else self.fsdp_mesh

    @property
    def _shards(self) -> DeviceMesh:
        assert self.mesh is not None, "of several ranks"
        return self.mesh[DATA_AXES] if self._fsdp_sums_copies else self.mesh["dp_shard"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh | None:
        """The world's mesh of FSDP2 for experts that are spread (`ep`): ranks that hold the same ones. None where they
        are not."""
        if self.expert_mesh is None:
            return None
        copies = ("dp_replicate",) if self._fsdp_sums_copies else ()
        return self.expert_mesh[(*copies, EXPERT_SHARDS)]

    @property
    def _fsdp_sums_copies(self) -> bool:
        return self.sizes.dp_replicate > 1 and not self.copies_apart

    def along(self, axis: str) -> Group:
        """The world's group of ranks along an axis of the mesh, by its name; this rank alone where the mesh has none
        such.

        Args:
            axis: of `parallel.mesh.AXES`.
        """
        return Group() if self.mesh is None or getattr(self.sizes, axis) == 1 else _along(self.mesh, axis)

    @property
    def expert_shards(self) -> Group:
        """The world's group of ranks that hold shards of the same experts."""
        mesh = self.expert_mesh
        return Group() if mesh is None or mesh[EXPERT_SHARDS].size() == 1 else _along(mesh, EXPERT_SHARDS)


def join(ranks: Ranks, sizes: MeshSizes, device: torch.device, timeout: timedelta | None = None) -> World:
    """Join an initialised `torch.distributed` as one process of the world. All ranks call it: it makes their groups.

    Args:
        ranks: what torchrun says of this process.
        sizes: of the mesh; their product is the number of processes.
        device: of the model; its type is the mesh's.
        timeout: of collectives in all groups; None leaves what they have.
    """
    if sizes.world == 1:
        return World.alone()
    axes = [axis for axis in AXES if axis in DATA_AXES or getattr(sizes, axis) > 1]
    mesh = _mesh(device, {axis: getattr(sizes, axis) for axis in axes})
    expert_mesh = _mesh(device, sizes.experts) if sizes.ep > 1 or sizes.tp > 1 else None
    if timeout is not None:  # those of a mesh would have half an hour
        meshes = [each for each in (mesh, expert_mesh) if each is not None]
        for group in (dist.group.WORLD, *(group for each in meshes for group in each.get_all_groups())):
            assert group is not None, "it is initialised"
            group.set_timeout(timeout)
    control = _of_all(timeout)
    traffic = TrafficCounter()

    def along(mesh: DeviceMesh | None, axis: str) -> Group:
        return Group() if mesh is None else replace(_along(mesh, axis), traffic=AxisTraffic(traffic, axis))

    return World(
        Group(dist.get_rank(), sizes.world, control),
        _group(sizes, DATA_AXES, timeout),
        _group(sizes, MODEL_AXES, timeout),
        *(ranks.local_rank, ranks.local_world),
        sizes,
        mesh,
        expert_mesh,
        _of_all(PATIENCE),
        0.0 if timeout is None else timeout.total_seconds(),
        row=_group(sizes, ("pp",), timeout),
        tensor=_along(mesh, "tp") if sizes.tp > 1 else Group(),
        experts=along(expert_mesh if sizes.ep > 1 else None, "ep"),
        traffic=traffic,
    )


def _of_all(timeout: timedelta | None) -> dist.ProcessGroup:
    """The world's group of all ranks for what is on the host."""
    made = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(made, dist.ProcessGroup), "this rank is in it"
    return made


def _along(mesh: DeviceMesh, axis: str) -> Group:
    """This rank's group of the world along an axis of a mesh, which has made it."""
    return Group(mesh.get_local_rank(axis), mesh[axis].size(), mesh.get_group(axis))


def _mesh(device: torch.device, axes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _group(sizes: MeshSizes, axes: Sequence[str], timeout: timedelta | None) -> Group:
    """Make this rank's group along some axes: the ranks with the same place along all the others."""
    inside = [number for number, axis in enumerate(AXES) if axis in axes]
    outside = [number for number, axis in enumerate(AXES) if axis not in axes]
    numbers = torch.arange(sizes.world).view([getattr(sizes, axis) for axis in AXES]).permute(*outside, *inside)
    found = Group()
    for members in numbers.flatten(0, len(outside) - 1).flatten(1).tolist():
        whole, alone = len(members) == sizes.world, len(members) == 1
        handle = None if alone else dist.group.WORLD if whole else dist.new_group(members, timeout=timeout)
        if dist.get_rank() in members:
            assert not isinstance(handle, int), "torch's number is for groups of others"
            found = Group(members.index(dist.get_rank()), len(members), handle)
    return found

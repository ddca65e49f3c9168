"""Start and end of `torch.distributed` around a run, what must be equal on all ranks before it begins, and the torch
that it takes.

    with launched(MeshSizes(dp_shard=REST), device="auto", timeout_s=600, facts={"recipe": digest}) as world:
        prepared = in_turn(world, prepare)          # the first prepares, the others find it prepared
        plan = on_first(world, measure_and_plan)    # the first does it, all have the result

torchrun names the ranks in the environment. One process needs none of this: no group is made and nothing is imported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tilewright.core import env
from tilewright.core.env import Ranks
from tilewright.core.errors import HardwareError, TilewrightError
from tilewright.parallel.agree import from_first, gather
from tilewright.parallel.liveness.ending import part
from tilewright.parallel.liveness.rendezvous import Meeting, meet, raise_where_unequal
from tilewright.parallel.mesh import MeshSizes
from tilewright.parallel.world import World, join

T = TypeVar("T")
_NOTHING: Mapping[str, str] = MappingProxyType({})


@contextmanager
def launched(
    sizes: MeshSizes,
    *,
    device: str,
    timeout_s: float,
    facts: Mapping[str, str] = _NOTHING,
    details: Callable[[], Mapping[str, Any]] = dict,
) -> Iterator[World]:
    """Launch a run's world; `torch.distributed` is initialised inside where there are several processes.

    Where it is initialised already, by a program of the user's, it is taken as it is, and stays; its groups have this
    timeout from then on.

    Args:
        sizes: of the mesh, as asked for: see `MeshSizes.fill`.
        device: "auto", "cpu" or "cuda". Each rank of a machine takes a GPU of its own.
        timeout_s: for which ranks wait for each other, at the start and in each collective.
        facts: what must be the same on all ranks, by what it is called in the error; compared before any group is made.
        details: the same in small pieces; gathered and compared where a fact differs, to name what does.

    Raises:
        ConfigError: the mesh does not fit the number of processes, or ranks differ in a fact.
        HardwareError: fewer GPUs than ranks on this machine, or ranks that do not come.
    """
    ranks = env.ranks()
    there = dist.is_available() and dist.is_initialized()
    if (dist.get_world_size() if there else ranks.world) == 1:
        sizes.fill(1)
        yield World.alone()
        return
    limit = timedelta(seconds=timeout_s)
    if there:
        everyone = dist.group.WORLD
        assert everyone is not None, "it is initialised"
        meeting = Meeting(everyone.get_group_store(), dist.get_rank(), dist.get_world_size(), timeout_s)
    else:
        meeting = meet(ranks, timeout_s)
    with nullcontext() if there or env.agent_store() is not None else _parting(meeting):
        _compare(meeting, facts, details)
        sizes = sizes.fill(meeting.world)
        on_gpu = device != "cpu" and torch.cuda.is_available()
        if not there:
            if device != "cpu":  # on all ranks, so that one without a GPU is named
                on_gpu = take_gpu(ranks, meeting) is not None
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            # Without `device_id`: with it a mesh would split its groups off this one, and torch (2.13) hands NCCL's
            # options to gloo's part of them (pytorch #182057). Made apart from it they have both backends.
            dist.init_process_group(
                backend, timeout=limit, store=meeting.store, rank=ranks.rank, world_size=ranks.world
            )
        world = join(ranks, sizes, torch.device("cuda" if on_gpu else "cpu"), limit)
        yield replace(world, meeting=meeting)
    if not there:  # not after an error: the others may be in the middle of a collective
        dist.destroy_process_group()


@contextmanager
def _parting(meeting: Meeting) -> Iterator[None]:
    """Part from a launch's store, which is in the first rank's process, where a user's error ends the run."""
    try:
        yield
    except TilewrightError:
        part(meeting.store, meeting.rank, meeting.world)
        raise


def _compare(meeting: Meeting, facts: Mapping[str, str], details: Callable[[], Mapping[str, Any]]) -> None:
    """Compare facts at launch: raise where ranks differ in one; of a recipe with the settings in which they do."""
    of_ranks = meeting.gather("recipe and versions", dict(facts))
    if any(of_rank != of_ranks[0] for of_rank in of_ranks):
        raise_where_unequal(meeting.gather("settings", dict(details())))
        raise_where_unequal(of_ranks)


def take_gpu(ranks: Ranks, meeting: Meeting) -> int | None:
    """Make the GPU of this rank the current one and return its index among those that the process sees; None if no rank
    sees any.

    A launcher may show the processes of a machine all of its GPUs, or each one of its own, or each some.

    Raises:
        HardwareError: ranks that find no GPU beside the others; on all ranks.
    """
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    told = meeting.gather("GPUs", [ranks.local_rank, seen])
    if not any(names for _, names in told):
        return None
    taken = share_gpus([names for _, names in told], [wanted for wanted, _ in told])
    without = [rank for rank, index in enumerate(taken) if index is None]
    if without:
        names = set(told[without[0]][1])
        beside = sum(bool(names.intersection(others)) for _, others in told)
        raise HardwareError(
            "Fewer GPUs than processes on a machine",
            got=f"rank {without[0]} sees {_counted(len(names), 'GPU')}"
            + (f", which {_counted(beside, 'process', 'es')} share" if names else ""),
            need="one GPU for each process",
            try_=(f"torchrun --nproc-per-node {len(names)}, or " if names else "") + "--run.device cpu",
        )
    index = taken[meeting.rank]
    assert index is not None, "none is without"
    torch.cuda.set_device(index)
    return index


def share_gpus(seen: Sequence[Sequence[str]], wanted: Sequence[int]) -> list[int | None]:
    """Share GPUs among ranks: one for each, none for two, for as many ranks as possible. Returns each GPU's number
    among those that the rank sees.

    Args:
        seen: names of the GPUs that each rank sees.
        wanted: the number that each takes where no other has it.

    Example:
        >>> share_gpus([["a", "b"], ["a", "b"]], [0, 1]), share_gpus([["a"], ["b"]], [0, 1])
        ([0, 1], [0, 0])
        >>> share_gpus([["a", "b"], ["a"]], [0, 0]), share_gpus([["a"], ["a"]], [0, 1])
        ([1, 0], [0, None])
    """
    owners: dict[str, int] = {}

    def place(rank: int, tried: set[str]) -> bool:
        numbers = sorted(range(len(seen[rank])), key=lambda number: number != wanted[rank])
        names = [seen[rank][number] for number in numbers]
        free = next((name for name in names if name not in owners), None)
        if free is not None:
            owners[free] = rank
            return True
        for name in names:
            if name not in tried:
                tried.add(name)
                if place(owners[name], tried):  # who has it takes another
                    owners[name] = rank
                    return True
        return False

    for rank in range(len(seen)):
        place(rank, set())
    by_rank = {rank: name for name, rank in owners.items()}
    return [names.index(by_rank[rank]) if rank in by_rank else None for rank, names in enumerate(seen)]


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"


def on_first(world: World, work: Callable[[], T], *, named: str = "") -> T:
    """Run `work()` on the first rank while the others wait, and return its result, which must pickle, on all ranks.

    Args:
        world: this run's.
        work: called on the first rank.
        named: what it is, before ranks watch each other (`RankWatch`): it may take `parallel.timeout_minutes` then.

    Raises:
        TilewrightError: the first rank's, on all.
        HardwareError: the first rank has not done in time what was named.
    """
    if world.waiting_group is None:
        return work()
    found: tuple[TilewrightError | None, T | None] | None = None
    if world.is_first:
        try:
            found = None, work()
        except TilewrightError as error:
            found = error, None
    if named and world.meeting is not None:
        world.meeting.after_first(named)
    world.waits()
    told = from_first(world.waiting_group, found)
    problem, value = told if found is None else found
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]


def in_turn(world: World, work: Callable[[], T]) -> T:
    """Run `work()`, which leaves something on the disk, on all ranks in turn: the first rank, then the first of each
    machine (whose disk may be its own), then the others, which find it there.

    Raises:
        TilewrightError: that of the first rank on which it failed, on all.
    """
    if world.waiting_group is None:
        return work()
    turns = (world.is_first, not world.is_first and world.local_rank == 0, world.local_rank != 0)
    done: list[T] = []
    for mine in turns:
        problem = None
        if mine:
            world.works()
            try:
                done.append(work())
            except TilewrightError as error:
                problem = error
        world.waits()
        for rank, found in enumerate(gather(world.waiting_group, problem)):
            if found is not None:
                raise problem if rank == world.rank and problem is not None else found
    return done[0]


def on_any(world: World, look: Callable[[], bool]) -> bool:
    """True if `look()` is true on any launched rank; each looks at what its own machine has."""
    if world.waiting_group is None:
        return look()
    found = look()
    world.waits()
    return any(gather(world.waiting_group, found))


def check_equal(world: World, facts: Mapping[str, str]) -> None:
    """Check at launch that each fact is the same on all ranks.

    Args:
        world: this run's.
        facts: by what they are called in the error.

    Raises:
        ConfigError: one differs; the same error on all ranks.
    """
    if world.size == 1:
        return
    world.waits()
    raise_where_unequal(gather(world.waiting_group, dict(facts)))


@dataclass(frozen=True)
class TorchNeed:
    """A feature that needs a torch that is not older, the reason, and a way without it.

    Example:
        >>> PIPELINES.check("2.13.0+cpu")
        >>> EXPERTS.check("2.9.1")
        Traceback (most recent call last):
        tilewright.core.errors.HardwareError: Expert parallelism needs a newer torch...
    """

    who: str
    why: str
    instead: str
    oldest: tuple[int, int] = (2, 13)

    def check(self, version: str = torch.__version__) -> None:
        """Check the torch that a launch needs: raise below it.

        Raises:
            HardwareError: it is older.
        """
        major, minor = (int(part) for part in version.split(".")[:2])
        if (major, minor) < self.oldest:
            oldest = ".".join(map(str, self.oldest))
            raise HardwareError(
                f"{self.who} a newer torch",
                got=f"torch {version}",
                need=f"torch {oldest} or newer: {self.why}",
                try_=f"pip install 'torch>={oldest}', or {self.instead}",
            )


PIPELINES = TorchNeed(
    "Pipelines need", "older ones take the shapes of a step from its first micro-batch", "--parallel.pp 1"
)
EXPERTS = TorchNeed(
    "Expert parallelism needs",
    "in older ones a layer's parameters are all sharded over the same processes",
    "--parallel.ep 1",
)

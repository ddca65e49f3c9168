"""Start and end of `torch.distributed` around a run, and what must be equal on all ranks before it begins.

    with launched(dp_replicate=1, dp_shard=-1, device="auto", timeout_s=600) as world:
        check_equal(world, {"recipe": digest})
        prepared = in_turn(world, prepare)          # the first prepares, the others find it prepared
        plan = on_first(world, measure_and_plan)    # the first does it, all have the result

torchrun names the ranks in the environment. One process needs none of this: no group is made and nothing is imported.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tilewright.core import env
from tilewright.core.env import Ranks
from tilewright.core.errors import ConfigError, HardwareError, TilewrightError
from tilewright.parallel.agree import from_first, gather
from tilewright.parallel.world import MeshSizes, World, join

T = TypeVar("T")
PATIENCE = timedelta(days=7)
"""How long ranks wait for work of unknown length that one of them does, such as preparing data. Below the 25 days
that 32 bits of milliseconds hold, should a backend count in them."""


@contextmanager
def launched(*, dp_replicate: int, dp_shard: int, device: str, timeout_s: float) -> Iterator[World]:
    """The world of this run; `torch.distributed` is initialised inside where there are several processes.

    Where it is initialised already, by a program of the user's, it is taken as it is, and stays.

    Args:
        dp_replicate: copies of the model.
        dp_shard: parts of a copy; -1: what is left.
        device: "auto", "cpu" or "cuda". Each rank of a machine takes a GPU of its own.
        timeout_s: after which a collective that does not end raises.

    Raises:
        ConfigError: the mesh does not fit the number of processes.
        HardwareError: fewer GPUs than ranks on this machine.
    """
    ranks = env.ranks()
    there = dist.is_available() and dist.is_initialized()
    sizes = MeshSizes.fill(dp_replicate, dp_shard, dist.get_world_size() if there else ranks.world)
    if sizes.world == 1:
        yield World.alone()
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu and not there:
        take_gpu(ranks)
    if not there:
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        gpu = {"device_id": torch.device("cuda", ranks.local_rank)} if on_gpu else {}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **_meeting(ranks), **gpu)
    world = join(ranks, sizes, torch.device("cuda" if on_gpu else "cpu"))
    yield replace(world, waiting_group=dist.new_group(backend="gloo", timeout=PATIENCE))
    if not there:  # not after an error: the others may be in the middle of a collective
        dist.destroy_process_group()


def _meeting(ranks: Ranks) -> dict[str, Any]:
    """Where the ranks meet, for `init_process_group`. torchrun's store outlives the ranks that it starts again, and
    holds where those of the attempt before could be reached, so each attempt has a part of it."""
    found = env.agent_store()
    if found is None:
        return {}
    host, port, attempt = found
    store = dist.PrefixStore(f"tilewright/attempt/{attempt}", dist.TCPStore(host, port, is_master=False))
    return {"store": store, "rank": ranks.rank, "world_size": ranks.world}


def take_gpu(ranks: Ranks) -> None:
    """Make the GPU of this rank the current one.

    Raises:
        HardwareError: there are fewer of them than ranks on this machine.
    """
    found = torch.cuda.device_count()
    if ranks.local_world > found:
        raise HardwareError(
            "Fewer GPUs than processes on this machine",
            got=f"{found} GPUs, {ranks.local_world} processes",
            need="one GPU for each process",
            try_=f"torchrun --nproc-per-node {found}, or --run.device cpu",
        )
    torch.cuda.set_device(ranks.local_rank)


def on_first(world: World, work: Callable[[], T]) -> T:
    """What `work()` returns on the first rank, which pickles, on all; the others wait, however long it takes.

    Raises:
        TilewrightError: the first rank's, on all.
    """
    if world.waiting_group is None:
        return work()
    found: tuple[TilewrightError | None, T | None] = (None, None)
    if world.is_first:
        try:
            found = None, work()
        except TilewrightError as error:
            from_first(world.waiting_group, (error, None))
            raise
    problem, value = from_first(world.waiting_group, found)
    if problem is not None:
        raise problem
    return found[1] if world.is_first else value  # type: ignore[return-value]


def in_turn(world: World, work: Callable[[], T]) -> T:
    """`work()` on all ranks, which leaves something on the disk: on the first one, then on the first of each machine
    (whose disk may be its own), then on the others, which find it there.

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
            try:
                done.append(work())
            except TilewrightError as error:
                problem = error
        for rank, found in enumerate(gather(world.waiting_group, problem)):
            if found is not None:
                raise problem if rank == world.rank and problem is not None else found
    return done[0]


def check_equal(world: World, facts: Mapping[str, str]) -> None:
    """Each fact is the same on all ranks.

    Args:
        world: this run's.
        facts: by what they are called in the error.

    Raises:
        ConfigError: one differs; the same error on all ranks.
    """
    if world.size == 1:
        return
    of_ranks = gather(world.waiting_group, dict(facts))
    for name, first in of_ranks[0].items():
        others = [rank for rank, of_rank in enumerate(of_ranks) if of_rank.get(name) != first]
        if others:
            shown = ", ".join(f"rank {rank}: {of_ranks[rank].get(name)}" for rank in others[:3])
            raise ConfigError(
                f"Ranks differ in their {name}",
                got=f"rank 0: {first}; {shown}" + (f", and {len(others) - 3} more" if len(others) > 3 else ""),
                need=f"the same {name} on all {world.size} ranks",
                try_="the same command, files and installation on each machine",
            )

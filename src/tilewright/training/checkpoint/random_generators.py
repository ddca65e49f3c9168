"""The random generators of all ranks in one checkpoint.

The first rank's have the names of a run of one process: tensors `rng.<device>`, and Python's and numpy's in the JSON.
Any other rank's are tensors `rng.rank<r>.<device>` and `rng.rank<r>.host`, where r is its number among the ranks that
read different rows; of several that read the same rows the others' are `rng.rank<r>.part<p>.`. Each rank of the run
that goes on takes the states of its number: in a run of as many ranks, what is drawn then is what would have been drawn
without the stop. A part that the checkpoint does not know takes the states of the rank that read the same rows: all of
them must drop the same elements. Where there are none, it begins with a seed made of the first rank's state and its
number, and so does each but the first of them in a fresh run: ranks that read different rows must not drop the same.
A rank has one GPU, called `cuda.0` whatever its number on the machine.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from tilewright.parallel.world import World
from tilewright.precision.snapshot import host_states, set_host_states, set_torch_states, torch_states

_PREFIX, _HOST = "rng.", "host"

Stored = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def seed_all(seed: int) -> None:
    """Seed the process-wide random generators that models may draw from; all three are in the checkpoint."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def draw_apart(world: World) -> None:
    """Let ranks that read different rows draw different random numbers from now on. The first rank draws as before; the
    others take a seed made of their number and of its state, which all have had until here."""
    if world.data.rank:
        _seed({f"{_PREFIX}cpu": torch.get_rng_state()}, world.data.rank)


def generator_tensors(world: World) -> dict[str, Tensor]:
    """Copies of the states of this rank's generators, by name. Python's and numpy's of the first rank are not among
    them."""
    if world.size == 1:
        return {f"{_PREFIX}{name}": state for name, state in torch_states().items()}
    own = _owners(world)[0]
    gpu = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
    states = {
        own + ("cuda.0" if name.startswith("cuda.") else name): state for name, state in torch_states(gpu).items()
    }
    if not world.is_first:
        states[own + _HOST] = torch.frombuffer(bytearray(json.dumps(host_states()).encode()), dtype=torch.uint8)
    return states


def stored_generators(stored: Stored, world: World) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """The states of generators in a checkpoint that this rank takes, or makes its own from."""
    taken = _of(_owner(stored, world), stored)
    return ((name, stored[name]) for name in taken)


def set_generators(states: Mapping[str, Tensor], host: Mapping[str, list[Any]], world: World) -> None:
    """Set this rank's random generators.

    Args:
        states: what `stored_generators` named, read.
        host: Python's and numpy's of the first rank.
        world: of this run.
    """
    owner = _owner(states, world)
    if owner == _PREFIX and world.data.rank:
        _seed(states, world.data.rank)
        return
    mine = {name.removeprefix(owner): states[name] for name in _of(owner, states)}
    if _HOST in mine:
        host = json.loads(mine.pop(_HOST).numpy().tobytes())
    set_host_states(host)
    set_torch_states(mine if world.size == 1 else {_inside(name): state for name, state in mine.items()})


def _owners(world: World) -> tuple[str, ...]:
    """Prefixes of the names of this rank's generators, and of those whose states it takes in their place, in turn."""
    rank = f"{_PREFIX}rank{world.data.rank}." if world.data.rank else _PREFIX
    return (f"{rank}part{world.part}.", rank, _PREFIX) if world.part else (rank, _PREFIX)


def _owner(names: Iterable[str], world: World) -> str:
    """The rank whose generators' states this one takes."""
    known = list(names)
    return next((owner for owner in _owners(world) if _of(owner, known)), _PREFIX)


def _of(owner: str, names: Iterable[str]) -> list[str]:
    """The generators' states of one rank among those of all."""
    own = (name for name in names if name.startswith(owner))
    return [name for name in own if not name.removeprefix(owner).startswith(("rank", "part"))]


def _seed(states: Mapping[str, Tensor], rank: int) -> None:
    """Seed the generators of a rank that takes no states of its own."""
    digest = xxhash.xxh3_64(rank.to_bytes(8, "little"))
    for name in sorted(states):
        digest.update(states[name].numpy().tobytes())
    seed_all(digest.intdigest())


def _inside(name: str) -> str:
    return f"cuda.{torch.cuda.current_device()}" if name.startswith("cuda.") and torch.cuda.is_available() else name

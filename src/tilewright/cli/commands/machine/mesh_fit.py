"""Options with which a model fits some mesh that fits none with those that were typed: each is tried before it is
named, so that what is advised does what is said."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tilewright.core.errors import ConfigError

if TYPE_CHECKING:
    from tilewright.planner.simulate.mesh.recipe_searches import MeshFinder

FinderOf = Callable[[int, Mapping[str, Any]], "MeshFinder"]
"""Of a number of ranks and the options of the command."""
MOST_TIMES = 64
"""Of the ranks that were given: so many are tried, at most."""


def fitting(finder_of: FinderOf, world: int, options: Mapping[str, Any]) -> list[str]:
    """Find options with which a mesh fits: more memory per rank, the fewest doublings of ranks, or the smallest larger
    GPU. Returns those of the three that help; empty if none does.

    Args:
        finder_of: makes the search.
        world: ranks with which nothing fits.
        options: with which nothing fits.
    """
    found = []
    for kind in (_memory, _worlds, _gpus):
        candidates = kind(finder_of, world, options)
        first = next((words for words, ranks, typed in candidates if _fits(finder_of, ranks, typed)), None)
        found += [first] if first else []
    return found


def tried_in_vain(world: int) -> str:
    """The words for no mesh that fits, an empty answer of `fitting`."""
    return f"nothing that was tried helps: up to --world {MOST_TIMES * world}, larger published GPUs; a smaller model"


Candidates = Iterator[tuple[str, int, Mapping[str, Any]]]
"""Words, ranks and options."""


def _fits(finder_of: FinderOf, world: int, options: Mapping[str, Any]) -> bool:
    try:
        return finder_of(world, options).fits()
    except ConfigError:  # no mesh fills these ranks, or they do not make up whole nodes
        return False


def _memory(finder_of: FinderOf, world: int, options: Mapping[str, Any]) -> Candidates:
    """Memory for a mesh that fits, of a budget that was typed: what the nearest one needs."""
    if options["device_memory"]:
        bytes_ = finder_of(world, {**options, "device_memory": ""}).nearest_memory()
        size = f"{math.ceil(10 * bytes_ / 2**30) / 10}GiB"
        yield f"--device-memory {size}", world, {**options, "device_memory": size}


def _worlds(finder_of: FinderOf, world: int, options: Mapping[str, Any]) -> Candidates:
    times = 2
    while times <= MOST_TIMES:
        nodes = ""
        if options["nodes"]:
            number, _, gpus = options["nodes"].strip().partition("x")
            nodes = f"{times * int(number)}x{gpus}"
        words = f"--world {times * world}" + (f" --nodes {nodes}" if nodes else "")
        yield words, times * world, {**options, "nodes": nodes}
        times *= 2


def _gpus(finder_of: FinderOf, world: int, options: Mapping[str, Any]) -> Candidates:
    from tilewright.planner.machine.gpu_specs import TABLE, find_published

    here = find_published(options["on"])
    if not options["device_memory"]:
        for row in sorted(TABLE.values(), key=lambda row: row.memory):
            if row.memory > here.memory:
                yield f"--on {row.name}", world, {**options, "on": row.name}

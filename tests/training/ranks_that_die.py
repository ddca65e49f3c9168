"""Ranks of which one is killed: what becomes of the others, and of the folder."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import started

PATIENCE_S = 100
"""For which the others are waited for after the kill; then they are killed too."""


def on_ranks_of_which_one_dies(
    world: int, victim: int, begun: Path, after_s: float, function: Callable[..., Any], *args: Any
) -> dict[int, Any]:
    """Run `function(rank, *args)` on each rank and kill one (SIGKILL); what the others returned, by rank.

    Args:
        world: number of ranks.
        victim: the rank that is killed.
        begun: a file or folder that the ranks make once they are under way.
        after_s: seconds from then to the kill.
        function: of a test module, by name.
        args: the same for all ranks. What a rank's function raises is an error of the test.

    Raises:
        AssertionError: another rank raised, or did not end in time.
    """
    with started(world, function, *args) as (processes, ends):
        until = time.monotonic() + PATIENCE_S
        while not begun.exists():
            assert time.monotonic() < until, f"{begun} is not there"
            assert processes[victim].is_alive(), f"rank {victim} ended by itself"
            time.sleep(0.01)
        time.sleep(after_s)
        processes[victim].kill()
        found = {}
        until = time.monotonic() + PATIENCE_S
        for rank in set(range(world)) - {victim}:
            assert ends[rank].poll(max(0.0, until - time.monotonic())), f"rank {rank} waits for rank {victim}"
            failed, value = ends[rank].recv()
            assert not failed, f"rank {rank} of {world}:\n{value}"
            found[rank] = value
        return found

"""Where the ranks of a run meet before they have groups: in a store, in which a rank that does not come can be named.

    meeting = Meeting(store, rank, world, timeout_s)
    meeting.gather("recipe", digest)           # every rank's, by rank
    meeting.after_first("the run folder")      # the first one has got so far

A group can be made only by ranks that agree about it: with two meshes they wait for each other in different calls. So
what a mesh is made from is compared here first. torchrun's store is there before its processes are; under another
launcher the first rank's process has it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tilewright.core import env
from tilewright.core.env import Ranks
from tilewright.core.errors import ConfigError, HardwareError

LOOK_S = 0.05


class Meeting:
    """Messages that ranks leave each other in a store.

    Args:
        store: of all of them.
        rank: of this process.
        world: number of ranks.
        timeout_s: for which others are waited for.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, timeout_s: float) -> None:
        number = store.add(f"meetings/{rank}", 1)  # a process may begin several runs, and all do so together
        self.store = store
        self.rank, self.world = rank, world
        self._told = dist.PrefixStore(f"meeting/{number}", store)
        self._timeout_s = timeout_s

    def gather(self, what: str, value: Any) -> list[Any]:
        """Gather every rank's value at the meeting, by rank, as JSON has it.

        Args:
            what: a name of its own in this run, for a user.
            value: of this rank.

        Raises:
            HardwareError: some ranks have not come here in time.
        """
        self._told.set(f"{what}/{self.rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self.world)]
        self._wait_for(what, keys)
        return [json.loads(self._told.get(key)) for key in keys]

    def after_first(self, what: str) -> None:
        """Let the other ranks wait at the meeting until the first rank has done something.

        Raises:
            HardwareError: it has not in time.
        """
        if self.rank == 0:
            self._told.set(f"{what}/0", "done")
        else:
            self._wait_for(what, [f"{what}/0"])

    def _wait_for(self, what: str, keys: Sequence[str]) -> None:
        """Wait for a rank at the meeting, asked again and again: the store's own `wait` warns on the screen."""
        until = time.monotonic() + self._timeout_s
        while missing := [key for key in keys if not self._told.check([key])]:
            if time.monotonic() > until:
                ranks = [key.rpartition("/")[2] for key in missing]
                shown = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
                raise late_error(f"Rank{'s' * (len(ranks) > 1)} {shown} of {self.world}", what, self._timeout_s)
            time.sleep(LOOK_S)


def late_error(who: str, what: str, timeout_s: float) -> HardwareError:
    """The error of ranks that are late at the meeting, for those that wait at the start.

    Args:
        who: the late ones.
        what: they have not done.
        timeout_s: they were waited for.
    """
    return HardwareError(
        f"{who} did not come to the start of the run: {what}",
        got=f"no word in {timeout_s:g} s",
        need="all processes of the run, which start together",
        try_="what they say on their machines; parallel.timeout_minutes if they need longer",
        where="parallel.timeout_minutes",
    )


def meet(ranks: Ranks, timeout_s: float) -> Meeting:
    """Let the ranks that a launcher has started meet before there is a group, by torchrun's store or one of the first
    rank's process.

    Raises:
        ConfigError: the launcher says not where ranks can meet.
        HardwareError: the first rank's process is not there.
    """
    limit = timedelta(seconds=timeout_s)
    found = env.agent_store()
    try:
        if found is not None:  # it outlives ranks that are started again, and holds what those before have told
            host, port, attempt = found
            store = dist.PrefixStore(f"tilewright/attempt/{attempt}", dist.TCPStore(host, port, timeout=limit))
        else:
            host, port = env.meeting_point()
            store = dist.TCPStore(host, port, is_master=ranks.rank == 0, timeout=limit, wait_for_workers=False)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise late_error(f"Rank 0 of {ranks.world}", f"no store at {host}:{port}", timeout_s) from error
    return Meeting(store, ranks.rank, ranks.world, timeout_s)


def raise_where_unequal(facts: Sequence[Mapping[str, Any]]) -> None:
    """Check at the meeting that each fact is the same on all ranks.

    Args:
        facts: by rank; by what they are called in the error.

    Raises:
        ConfigError: one differs.
    """
    for name, first in facts[0].items():
        others = [rank for rank, of_rank in enumerate(facts) if of_rank.get(name) != first]
        if others:
            shown = ", ".join(f"rank {rank}: {facts[rank].get(name)}" for rank in others[:3])
            raise ConfigError(
                f"Ranks differ in their {name}",
                got=f"rank 0: {first}; {shown}" + (f", and {len(others) - 3} more" if len(others) > 3 else ""),
                need=f"the same {name} on all {len(facts)} ranks",
                try_="the same command, files and installation on each machine",
            )

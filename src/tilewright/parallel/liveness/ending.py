"""How the ranks of a command end on an error: what all of them met is printed once, what one met alone by that one.

Ranks meet in torchrun's store, which is there before `torch.distributed` is initialised and after it failed. Under
another launcher each rank speaks for itself; the store is in the first rank's process then, which ends as the last one.
"""

import time
from datetime import timedelta

import torch.distributed as dist

from tilewright.core import env

PATIENCE_S = 4.0
"""How long a rank waits to see whether others met the same. torchrun ends all ranks as soon as one has ended."""


def prints(text: str) -> bool:
    """True if this rank prints an error at the command's end; called by each rank that met one.

    Args:
        text: of the error. The first rank prints its own; another one does where the first one met none, or another.
    """
    ranks, store = env.ranks(), _store()
    if store is None or ranks.world == 1:
        return True
    try:
        store.set(str(ranks.rank), text)
        if ranks.rank == 0:
            _there(store, [str(rank) for rank in range(1, ranks.world)])  # else torchrun may end this one first
            return True
        return not _there(store, ["0"]) or store.get("0").decode() != text
    except dist.DistNetworkError:  # torchrun of the first machine is gone: no other rank can be asked
        return True


def others_failed() -> list[int]:
    """Ranks that end on an error too; asked by one that lost its connection to another."""
    ranks, store = env.ranks(), _store()
    if store is None:
        return []
    others = [rank for rank in range(ranks.world) if rank != ranks.rank]
    try:
        return [rank for rank in others if store.check([str(rank)])]
    except dist.DistNetworkError:  # as in `prints`
        return []


def is_lost_store(error: BaseException) -> bool:
    """True if an error says that the store in which ranks meet is gone: the first rank's process has ended, or torchrun
    on its machine has."""
    return isinstance(error, dist.DistNetworkError)


def part(store: dist.Store, rank: int, world: int) -> None:
    """Part before this rank ends on an error, from a store in the first rank's process: that one waits for the others,
    which may still read there what it told them.

    Args:
        store: of all of them.
        rank: of this process.
        world: number of ranks.
    """
    gone = dist.PrefixStore("gone", store)
    try:
        gone.set(str(rank), "")
        if rank == 0:
            _there(gone, [str(other) for other in range(1, world)])
    except dist.DistNetworkError:  # the first one has waited long enough, or met an error alone
        return


def _there(store: dist.Store, keys: list[str]) -> bool:
    """True if all ranks that end are there, within the patience. Asked again and again: `wait` warns on the screen."""
    until = time.monotonic() + PATIENCE_S
    while not store.check(keys):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _store() -> dist.Store | None:
    """torchrun's store in which ranks meet at the end, this attempt's part of it; None where there is none."""
    found = env.agent_store()
    if found is None:
        return None
    host, port, attempt = found
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    except (dist.DistStoreError, dist.DistNetworkError):  # torchrun itself is gone
        return None
    return dist.PrefixStore(f"tilewright/end/{attempt}", store)

"""An allocator's error of one rank, raised on all, where no rank waits in a collective meanwhile."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tilewright.memory.tracking.format import is_out_of_memory
from tilewright.parallel.agree import any_of


class OnAllRanksError(torch.OutOfMemoryError):
    """A rank found no memory; raised on all of them, which have all stopped at the same place."""


@contextmanager
def oom_on_all(
    group: dist.ProcessGroup | None, device: torch.device, before: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside, no rank waits for another; afterwards all go on, or none does.

    Args:
        group: ranks; None: the allocator's error is raised as it is.
        device: of what the ranks exchange.
        before: called on every rank before they agree, also on one that has found no memory: calls the collectives that
            were begun inside to their end.

    Raises:
        OnAllRanksError: an allocator found no memory on one of them.
    """
    if group is None:
        yield
        return
    said = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        traceback.clear_frames(error.__traceback__)  # they hold what was computed up to it
    before()
    if any_of(group, said is not None, device):
        raise OnAllRanksError("out of memory on another rank" if said is None else said)

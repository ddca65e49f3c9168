"""An allocator's error of one rank, raised on all, where no rank waits in a collective meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tilewright.memory.tracking.format import is_out_of_memory
from tilewright.parallel.agree import any_of


class OnAllRanksError(torch.OutOfMemoryError):
    """A rank found no memory; raised on all of them, which have all stopped at the same place."""


@contextmanager
def oom_on_all(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Inside, no rank calls a collective; afterwards all go on, or none does.

    Args:
        group: ranks; None: the allocator's error is raised as it is.
        device: of what the ranks exchange.

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
    if any_of(group, said is not None, device):
        raise OnAllRanksError("out of memory on another rank" if said is None else said)

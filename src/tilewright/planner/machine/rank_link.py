"""How fast the ranks of one machine exchange bytes over gloo: measured by so many processes of its own, for a moment.

Called by `planner.cost.links`, which caches the result. A CPU's ranks share its cores, so speeds are those of a number
of ranks.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import spawn

from tilewright.core.subprocess_call import answer, call_module

NUMBERS = 2**21
"""FP32 numbers of the whole tensor, about: 8 MiB, a layer of a small model."""
TIMES = 7
TIMEOUT_S = 60.0


def measure(ranks: int, progress: Callable[[str], None] | None = None) -> dict[str, float]:
    """Bytes a second of `gather`, `scatter` and `reduce` (`cost.traffic.RankSpeed`).

    Args:
        ranks: processes, each with one thread.
        progress: called with a line of text before.

    Raises:
        HardwareError: the process that starts them was killed.
    """
    if progress:
        progress(f"measuring what {ranks} processes exchange once")
    return call_module(__name__, ranks=ranks)


def _measure_here(ranks: int) -> dict[str, float]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    spawn(_rank, args=(ranks, store.port, results), nprocs=ranks)
    return results.get()


def _rank(rank: int, ranks: int, port: int, results: "mp.SimpleQueue") -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # the new names of these collectives are not in torch 2.11
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))
    part = torch.ones(NUMBERS // ranks)
    whole = torch.ones(ranks * len(part))
    calls = {
        "gather": lambda: dist.all_gather_into_tensor(whole, part),
        "scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce": lambda: dist.all_reduce(whole),
    }
    found = {name: whole.nbytes / _middle(call) for name, call in calls.items()}
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _middle(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TIMES):
        dist.barrier()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one makes connections


if __name__ == "__main__":
    answer(_measure_here)

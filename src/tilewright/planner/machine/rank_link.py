"""How fast the ranks of one machine exchange bytes over gloo: measured by so many processes of its own, for a moment.

`measure` is called by `planner.cost.storage_links`, which caches the result; `links` by `tilewright bench comm`. A
CPU's ranks share its cores, so speeds are those of a number of ranks.
"""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tilewright.core.config.sections.parallel import WireName
from tilewright.core.hardware import detect_machine
from tilewright.core.subprocess_call import answer, call_module
from tilewright.planner.machine.exchange_times import OPERATIONS
from tilewright.planner.machine.exchange_times import measure as measure_exchanges
from tilewright.planner.machine.measured_links import LinkOperation, LinkPoint, MeasuredLinks

LAYER_BYTES = 2**23
"""Of the whole tensor, about: a layer of a small model."""
NAMES: dict[str, LinkOperation] = {
    "gather": "all_gather",
    "scatter": "reduce_scatter",
    "reduce": "all_reduce",
    "exchange": "all_to_all",
}
"""Of `cost.rank_traffic.RankSpeed`."""
TIMEOUT_S = 60.0
Operations = Sequence[tuple[LinkOperation, WireName]]


def measure(ranks: int, progress: Callable[[str], None] | None = None) -> dict[str, float]:
    """Measure exchanges between ranks of one machine over gloo: bytes a second by name of
    `cost.rank_traffic.RankSpeed`.

    Args:
        ranks: processes, each with one thread.
        progress: called with a line of text before.

    Raises:
        HardwareError: one of the processes was killed.
    """
    if progress:
        progress(f"measuring what {ranks} processes exchange once")
    points = _started(ranks, [LAYER_BYTES], [(operation, "fp32") for operation in NAMES.values()])
    rates = {point.operation: point.tensor_bytes / point.seconds for point in points}
    return {name: rates[operation] for name, operation in NAMES.items()}


def links(ranks: int, sizes: Sequence[int]) -> MeasuredLinks:
    """The links between so many ranks of this machine, each with one thread: exchanges of all operations.

    Args:
        ranks: processes, which this call starts.
        sizes: bytes of the whole tensors in FP32.

    Raises:
        HardwareError: one of the processes was killed.
    """
    points = _started(ranks, sizes, OPERATIONS)
    return MeasuredLinks(ranks, 1, "gloo", detect_machine("cpu").device_name, tuple(points))


def _started(ranks: int, sizes: Sequence[int], operations: Operations) -> list[LinkPoint]:
    """The measurement of the link between ranks by processes that end with this call."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> list[dict[str, Any]]:
        arguments = {"ranks": ranks, "port": store.port, "sizes": list(sizes), "operations": list(operations)}
        return call_module(__name__, rank=rank, **arguments)

    with ThreadPoolExecutor(ranks) as pool:
        first, *_ = pool.map(run, range(ranks))
    return [LinkPoint(**point) for point in first]


def _rank(rank: int, ranks: int, port: int, sizes: list[int], operations: Operations) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # the new names of these collectives are not in torch 2.11
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S))
    group = dist.group.WORLD
    assert group is not None, "it is initialised"
    points = measure_exchanges(group, torch.device("cpu"), sizes, operations=operations)
    dist.barrier()
    dist.destroy_process_group()
    return [asdict(point) for point in points]


if __name__ == "__main__":
    answer(_rank)

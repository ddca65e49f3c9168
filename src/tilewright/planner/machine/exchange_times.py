"""Seconds of exchanges between the ranks of a group, by operation, wire format and size: what each rank runs.

    points = measure(group, torch.device("cpu"), sizes=[2**12, 2**24])

All ranks call it together and get the same answer. An exchange has ended where its last rank has its result.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.core.config.sections.parallel import WireName
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.traffic import Exchanged, TrafficCounter
from tilewright.planner.machine.measured_links import LinkOperation, LinkPoint

OPERATIONS: tuple[tuple[LinkOperation, WireName], ...] = (
    ("all_gather", "fp32"),
    *((operation, wire) for operation in ("reduce_scatter", "all_reduce") for wire in ("fp32", "bf16", "fp8")),
    ("all_to_all", "fp32"),
    ("send", "fp32"),
)  # type: ignore[assignment]
"""Sums in each wire format; what is sent as it is, as FP32."""
TIMES = 7
"""Exchanges of one size. The first one makes connections, and is left out."""


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: Sequence[int],
    *,
    operations: Sequence[tuple[LinkOperation, WireName]] = OPERATIONS,
    kernels: Kernels | None = None,
    on_point: Callable[[LinkPoint], None] = lambda _: None,
) -> list[LinkPoint]:
    """Measure times of exchanges between the ranks of a group: points of each operation, wire format and size.

    Args:
        group: of two ranks or more, over a backend that takes tensors of the device.
        device: where the tensors are.
        sizes: bytes of the whole tensor in FP32; rounded up to as many values on each rank.
        operations: with their wire formats.
        kernels: make FP8 codes; None: the machine's best.
        on_point: called with each as soon as it is there.
    """
    found = []
    for operation, wire in operations:
        traffic = TrafficCounter()
        communicator = AsyncCommunicator(group, axis="ranks", wire=wire, kernels=kernels, traffic=traffic)
        for size in sizes:
            ranks = dist.get_world_size(group)
            whole = torch.ones(ranks * -(-size // (4 * ranks)), device=device)
            call = _call(operation, communicator, group, whole)
            traffic.take()
            seconds = _middle(group, device, call)
            counted = sum(traffic.take().values(), Exchanged())
            # `send` is not counted
            sent = counted.sent_bytes // counted.exchanges if counted.exchanges else whole.nbytes
            found.append(LinkPoint(operation, wire, whole.nbytes, sent, seconds))
            on_point(found[-1])
    return found


def _call(
    operation: LinkOperation, communicator: AsyncCommunicator, group: dist.ProcessGroup, whole: Tensor
) -> Callable[[], object]:
    """One timed exchange between ranks, through when it returns (on a GPU: in the stream's order)."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    part, other = whole.new_ones(len(whole) // size), torch.empty_like(whole)

    def send() -> None:
        there, here = (rank + 1) % size, (rank - 1) % size
        steps = [
            dist.P2POp(dist.isend, whole, group=group, group_peer=there),
            dist.P2POp(dist.irecv, other, group=group, group_peer=here),
        ]
        for work in dist.batch_isend_irecv(steps):
            work.wait()

    return {
        "all_gather": lambda: communicator.async_all_gather(other, part).wait(),
        "reduce_scatter": lambda: communicator.async_reduce_scatter(part, whole).wait(),
        "all_reduce": lambda: communicator.async_all_reduce(other.fill_(1.0)).wait(),
        "all_to_all": lambda: communicator.async_all_to_all(other, whole).wait(),
        "send": send,
    }[operation]


def _middle(group: dist.ProcessGroup, device: torch.device, call: Callable[[], object]) -> float:
    """The median, over exchanges, of the seconds of the rank that waits longest."""
    seconds = torch.tensor([*_timed(group, device, call)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return statistics.median(seconds.tolist()[1:])


def _timed(group: dist.ProcessGroup, device: torch.device, call: Callable[[], object]) -> Iterator[float]:
    for _ in range(TIMES):
        dist.barrier(group)
        _settle(device)
        began = time.perf_counter()
        call()
        _settle(device)
        yield time.perf_counter() - began


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

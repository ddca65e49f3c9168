"""How much of the exchange of gradients is hidden behind the backward pass, on a link of known speed.

Layers wait for as long as they are said to compute, transfers for bytes / rate + latency (`PacedTransport`): what is
measured is the order in which buckets are sent and waited for (`GradientSums`, `AsyncCommunicator`), with the real
codes of each wire format, whatever else a machine does. Hidden is what a step is shorter than computing first and
sending then, as a share of the transfers. The last layer's transfer has nothing to hide behind: of 8 equal ones 12.5 %.

python -m benchmarks.ranks.overlap
"""

import statistics
import time
from datetime import timedelta
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import write_result
from benchmarks.ranks.exchanges import PacedTransport
from tilewright.core.config.sections.parallel import WireName
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.communicator import AsyncCommunicator
from tilewright.parallel.communicate.wire import row_bytes
from tilewright.parallel.gradients import GradientSums

CLAIM = "at least 65 % of the exchange of gradients is hidden where backward takes at least as long"
LEAST = 0.65
RANKS, LAYERS, WEIGHTS, LATENCY_S, TRANSFER_S, REPEATS = 2, 8, 2**17, 0.002, 0.15, 3
RATIOS = (0.5, 1.0, 2.0)
"""Seconds of a layer in those of its transfer."""


class _Waits(torch.autograd.Function):
    """A layer whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.like = seconds, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return dy, torch.ones_like(ctx.like), None


def step(weights: list[nn.Parameter], seconds: float, sums: GradientSums | None) -> float:
    """Seconds of a backward pass, with its exchanges where there are sums."""
    x = torch.ones(1, requires_grad=True)
    for weight in weights:
        x = _Waits.apply(x, weight, seconds)
    began = time.perf_counter()
    if sums is not None:
        sums.begin(last=True)
    x.sum().backward()
    if sums is not None:
        sums.send_rest()
        sums.finish()
    for weight in weights:
        weight.grad = None
    return time.perf_counter() - began


def measure(wire: WireName, ratio: float, kernels: Kernels) -> dict[str, float]:
    """The share that is hidden, and seconds, as medians."""
    sent = row_bytes(WEIGHTS, wire) * 2 * (RANKS - 1) / RANKS
    hops = 1 if wire == "fp32" else 2
    link = PacedTransport(RANKS, rate=sent / (TRANSFER_S - hops * LATENCY_S), latency=LATENCY_S)
    weights = [nn.Parameter(torch.zeros(WEIGHTS)) for _ in range(LAYERS)]
    communicator = AsyncCommunicator(dist.group.WORLD, wire=wire, kernels=kernels, transport=link)
    sums = GradientSums(communicator, weights[::-1], bucket_bytes=1)
    sums.overlap()
    rows = []
    for _ in range(REPEATS):
        alone = step(weights, ratio * TRANSFER_S, None)
        link.slept.clear()
        together = step(weights, ratio * TRANSFER_S, sums)
        transfers = sum(link.slept)
        rows.append((1 - (together - alone) / transfers, alone, transfers, together))
    names = ("hidden", "backward_s", "transfers_s", "step_s")
    return {name: statistics.median(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def main() -> None:
    """Measure each format at each ratio, and write the result."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(minutes=1))
    torch.set_num_threads(1)
    kernels = Kernels(detect_machine("cpu"), compile=False)
    found: dict[str, dict[str, float]] = {}
    for wire in get_args(WireName):
        for ratio in RATIOS:
            one = found[f"{wire}, {ratio:g} x"] = measure(wire, ratio, kernels)
            print(f"{wire} {ratio:g}: {one['hidden']:.1%} hidden, {one}", flush=True)
    within = min(one["hidden"] for name, one in found.items() if float(name.split()[1]) >= 1) >= LEAST
    dist.destroy_process_group()
    write_result("overlap", CLAIM, {"cases": found, "layers": LAYERS, "least": LEAST, "holds": within}, [])


if __name__ == "__main__":
    main()

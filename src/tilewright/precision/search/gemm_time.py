"""Seconds of a layer's three matmuls in BF16 and in FP8, with the quantisation that FP8 needs.

Measured on this machine, or estimated for an H200 from `gemms`' rates, which is an estimate and is called so wherever
it is shown. Quantisation is kept apart from the matmuls, because several matmuls share it: an input is read and
written row by row once for all layers that read it, and its column-wise copy is made along with it. Called by
`training.precision_search`; the solver in `policy_search` adds up.

Legend: N tokens of a micro-batch  K input features  M output features.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW
from tilewright.ops.kernels import Kernels
from tilewright.precision.policy.gemm_formats import BANDWIDTH, BF16_FLOPS, FP8_FLOPS, GEMM_NAMES
from tilewright.precision.search.layer_stats import SearchUnit

TIMES = {
    "measured": "measured on this machine",
    "h200": "an estimate for one H200 from its rates; nothing was measured",
    "ideal": "a bound: matmuls at an H200's rates, quantisation taken as free; nothing was measured",
}
"""Where seconds come from, in words."""
REPEATS = 7


@dataclass(frozen=True)
class UnitTime:
    """Seconds of a unit in one micro-batch.

    Args:
        bf16: of each matmul in BF16.
        fp8: of each matmul in FP8, its operands given.
        input_row: quantising the input for fprop or wgrad, once for the layers that read it.
        input_column: what its column-wise copy for wgrad costs on top.
        gradient_row: the same for the output's gradient, which dgrad and wgrad read.
        gradient_column: the same on top for wgrad.
        weight: quantising the weight for fprop or dgrad: once an optimizer step, a micro-batch's part of it.
    """

    bf16: Mapping[str, float]
    fp8: Mapping[str, float]
    input_row: float
    input_column: float
    gradient_row: float
    gradient_column: float
    weight: float


def estimate(unit: SearchUnit, micro_batches: int, *, ideal: bool = False) -> UnitTime:
    """Estimate the time of a unit's GEMMs: seconds on an H200, by the arithmetic of `gemm_formats.expected_gain`: FLOPs
    and bytes over its rates.

    Args:
        unit: its shapes and tokens.
        micro_batches: of one optimizer step.
        ideal: leave quantisation out.

    Example:
        >>> unit = SearchUnit("up", ("up",), 4096, 16384, tokens=1_000_000)
        >>> time = estimate(unit, 1)
        >>> quantise = time.input_row + time.input_column + time.gradient_row + time.gradient_column + time.weight
        >>> round(sum(time.bf16.values()) / (sum(time.fp8.values()) + quantise), 2)  # as expected_gain says
        1.77
    """
    n, k, m = unit.tokens, unit.in_features, unit.out_features
    flops = 2.0 * n * k * m
    second = 0.0 if ideal else 1 / BANDWIDTH
    read_and_write, write = 3 * second, 1 * second  # BF16 read, 8 bits written; 8 bits written once more
    weight = len(unit.layers) * 5 * k * m * second / micro_batches if n else 0.0  # FP32 master read, 8 bits written
    return UnitTime(
        dict.fromkeys(GEMM_NAMES, flops / BF16_FLOPS),
        dict.fromkeys(GEMM_NAMES, flops / FP8_FLOPS),
        read_and_write * n * k,
        write * n * k,
        read_and_write * n * m,
        write * n * m,
        weight,
    )


def measure_times(unit: SearchUnit, micro_batches: int, kernels: Kernels, device: torch.device) -> UnitTime:
    """Measure the time of a unit's GEMMs: seconds on this machine at its shape: medians of several repeats, of random
    operands.

    Args:
        unit: its shapes and tokens. Experts are taken as equally busy.
        micro_batches: of one optimizer step.
        kernels: implementations.
        device: where they run.
    """
    num = len(unit.layers)
    rows, k, m = max(unit.tokens // num, 1), unit.in_features, unit.out_features
    x, dy = (torch.randn(rows, size, device=device, dtype=torch.bfloat16) for size in (k, m))
    master = torch.randn(m, k, device=device) / k**0.5
    weight = master.bfloat16()

    def seconds(run: Callable[[], object]) -> float:
        return num * median_seconds(run, device)

    def tiles(tensor: torch.Tensor):
        return kernels.quantize(tensor, FP8_ROW)

    # The three GEMMs in both formats: x [N, K], dy [N, M], weight [M, K].
    both_x, both_dy = kernels.quantize_both(x, FP8_ROW), kernels.quantize_both(dy, FP8_ROW)
    block = kernels.quantize(master, FP8_BLOCK)
    bf16 = {
        "fprop": seconds(lambda: kernels.linear(x, weight)),
        "dgrad": seconds(lambda: kernels.linear(dy, weight.T)),
        "wgrad": seconds(lambda: kernels.linear(dy.T, x.T)),
    }
    fp8 = {
        "fprop": seconds(lambda: kernels.tile_gemm(both_x[0], block, out_dtype=torch.bfloat16)),
        "dgrad": seconds(lambda: kernels.tile_gemm(both_dy[0], block.transposed(), out_dtype=torch.bfloat16)),
        "wgrad": seconds(lambda: kernels.tile_gemm(both_dy[1], both_x[1], out_dtype=torch.float32)),
    }
    # What quantising takes: row-wise copies, then what column-wise ones add.
    row_x, row_dy = seconds(lambda: tiles(x)), seconds(lambda: tiles(dy))
    column_x, column_dy = (seconds(lambda t=t: kernels.quantize_both(t, FP8_ROW)) for t in (x, dy))
    return UnitTime(
        bf16,
        fp8,
        row_x,
        max(column_x - row_x, 0.0),
        row_dy,
        max(column_dy - row_dy, 0.0),
        seconds(lambda: kernels.quantize(master, FP8_BLOCK)) / micro_batches,
    )


def median_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of a call of GEMMs in seconds, after two that warm up."""
    for _ in range(2):
        run()
    samples = []
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Encoding to 8-bit tiles and decoding on a CPU, against copying the same bytes; and where a linear layer's time goes.

Each function and its copy run in turns; the copy reads and writes, together, as many bytes as the function does. Both
allocate their result. The matrix is of BF16 (FP32 where named); its buffers are below the size from which the C library
returns memory to the system at once, so page faults are not what is measured.

python -m benchmarks.numerics.fp8_cpu [--rounds 30]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import machine_kind, spread, write_result
from tilewright.core.hardware import detect_machine
from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE
from tilewright.formats.spec import E4M3, E5M2
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW
from tilewright.ops.backends.cpu import fp8
from tilewright.ops.kernels import Kernels

CLAIM = "8-bit tiles are encoded and decoded on a CPU within 3 times the time of a memory copy of the same bytes"
ROWS, COLS = 4096, 3072
TOKENS, FEATURES = 4096, 1024
TILES = {"1x128": ROW_TILE, "128x1": COLUMN_TILE, "128x128": BLOCK_TILE}

Work = Callable[[], object]


def against_copies() -> dict[str, tuple[Work, int]]:
    """By name: what to time, and the bytes that it reads and writes."""
    x = torch.randn(ROWS, COLS).to(torch.bfloat16)
    wide, codes_bytes = x.float(), x.numel()
    cases: dict[str, tuple[Work, int]] = {}
    for name, tile in TILES.items():
        tiled = fp8.quantize(x, E4M3, tile)
        cases[f"encode {name}"] = (lambda tile=tile: fp8.quantize(x, E4M3, tile), x.nbytes + codes_bytes)
        cases[f"decode {name}"] = (lambda tiled=tiled: fp8.decode_bf16(tiled), x.nbytes + codes_bytes)
    cases["encode 1x128 e5m2"] = (lambda: fp8.quantize(x, E5M2, ROW_TILE), x.nbytes + codes_bytes)
    cases["encode both ways"] = (lambda: fp8.quantize_both(x, E4M3), x.nbytes + 2 * codes_bytes)
    cases["encode 128x128 fp32"] = (lambda: fp8.quantize(wide, E4M3, BLOCK_TILE), wide.nbytes + codes_bytes)
    return cases


def parts_of_a_layer() -> dict[str, Work]:
    """By name: the pieces of forward and backward of a linear layer with 8-bit operands, and all of it in BF16."""
    kernels = Kernels(detect_machine("cpu"))
    x, dy = (torch.randn(TOKENS, FEATURES).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(FEATURES, FEATURES)
    low = weight.to(torch.bfloat16)
    row, column = kernels.quantize_both(x, FP8_ROW)
    dy_row, dy_column = kernels.quantize_both(dy, FP8_ROW)
    tiled = kernels.quantize(weight, FP8_BLOCK)
    pairs = ((row, tiled), (dy_row, tiled.transposed()), (dy_column, column))
    decoded = [(fp8.decode_bf16(a, turn=True), fp8.decode_bf16(b)) for a, b in pairs]

    def plain() -> tuple[Tensor, Tensor, Tensor]:
        return F.linear(x, weight.to(torch.bfloat16)), dy @ low, (dy.T @ x).float()

    def whole() -> None:
        copies, weights = kernels.quantize_both(x, FP8_ROW), kernels.quantize(weight, FP8_BLOCK)
        kernels.tile_gemm(copies[0], weights, out_dtype=torch.bfloat16)
        grads = kernels.quantize_both(dy, FP8_ROW)
        kernels.tile_gemm(grads[0], weights.transposed(), out_dtype=torch.bfloat16)
        kernels.tile_gemm(grads[1], copies[1], out_dtype=torch.float32)

    return {
        "bf16 layer": plain,
        "fp8 layer": whole,
        "matmuls alone": lambda: [F.linear(a, b) for a, b in decoded],
        "decode operands": lambda: [(fp8.decode_bf16(a, turn=True), fp8.decode_bf16(b)) for a, b in pairs],
        "encode x and dy": lambda: (kernels.quantize_both(x, FP8_ROW), kernels.quantize_both(dy, FP8_ROW)),
        "encode weight": lambda: kernels.quantize(weight, FP8_BLOCK),
    }


def in_turns(functions: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Seconds by name, the functions in turns after two rounds of warming up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    copies = {}
    for name, (work, nbytes) in against_copies().items():
        source = torch.ones(nbytes // 2, dtype=torch.uint8)
        seconds = in_turns({"work": work, "copy": source.clone}, rounds)
        ratio = spread([mine / copy for mine, copy in zip(seconds["work"], seconds["copy"], strict=True)])
        copies[name] = {"seconds": spread(seconds["work"]), "copy": spread(seconds["copy"]), "over_copy": ratio}
        print(f"{name:<22} {statistics.median(seconds['work']) * 1e3:6.2f} ms, {ratio['median']:.2f} copies")
    layer = {name: spread(samples) for name, samples in in_turns(parts_of_a_layer(), rounds).items()}
    for name, sample in layer.items():
        print(f"{name:<22} {sample['median'] * 1e3:6.2f} ms")
    results = {"threads": torch.get_num_threads(), "matrix": [ROWS, COLS], "copies": copies}
    results |= {"layer": {"tokens": TOKENS, "features": FEATURES, "seconds": layer}}
    write_result(f"fp8_cpu_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()

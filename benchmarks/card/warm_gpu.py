"""Compile Triton kernels in parallel before anything is measured or tested: each specialisation once, into the cache on
disk, which all later processes read. One process compiles one kernel per second or slower, and tests of odd shapes need
some hundreds.

Kernels that runs use come first, then what tests draw: dtypes, formats, ways of tiles, and sizes that are one, a
multiple of 16, or neither, which are other code each.

python -m benchmarks.card.warm_gpu [--seconds 40] [--workers 12] [--tiny]
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.common import Deadline, arguments_for_card, parser_of, write_result
from tilewright.formats.scaling import BLOCK_TILE, COLUMN_TILE, ROW_TILE, TENSORWISE, Tile
from tilewright.formats.spec import E4M3, E5M2, FloatSpec
from tilewright.formats.tiled import TiledTensor

CLAIM = "every specialisation of the Triton kernels is compiled before it is measured"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (256, 200, 129, 1)
"""A multiple of 128, one of 8, an odd one, one: columns of each are other code."""
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
Case = tuple[str, Callable[[], object]]


def cases() -> Iterator[Case]:
    """Every launch, those of training steps first."""
    yield from _cases((torch.bfloat16,), (E4M3,), SIZES[:1])
    yield from _cases((torch.float32,), (E4M3,), SIZES[:1])
    yield from _cases(DTYPES, (E4M3, E5M2), SIZES)


def _cases(dtypes: Sequence[torch.dtype], specs: Sequence[FloatSpec], sizes: Sequence[int]) -> Iterator[Case]:
    flags, tiles = (True, False), (ROW_TILE, BLOCK_TILE, COLUMN_TILE, TENSORWISE, Tile(1, 0))
    for dtype, spec, cols in itertools.product(dtypes, specs, sizes):
        label = f"{str(dtype).removeprefix('torch.')} {spec.name} {cols}"
        for tile, power_of_two, noisy in itertools.product(tiles, flags, flags):
            run = partial(_quantize, cols, dtype, spec, tile, power_of_two, noisy)
            yield f"quantize {label} {tile} {power_of_two} {noisy}", run
        for tile in (BLOCK_TILE, ROW_TILE, TENSORWISE):
            yield f"quantize turned {label} {tile}", partial(_turned, cols, dtype, spec, tile)
        for rows in sizes:
            for power_of_two in flags:
                yield f"both {label} {rows} {power_of_two}", partial(_both, rows, cols, dtype, spec, power_of_two)
            yield f"norm {label} {rows}", partial(_norm, rows, cols, dtype, spec)
            yield f"swiglu {label} {rows}", partial(_swiglu, rows, cols, dtype, spec)
        for summed, tile, bias in itertools.product(sizes, (BLOCK_TILE, ROW_TILE, TENSORWISE), flags):
            yield f"gemm {label} {summed} {tile} {bias}", partial(_gemm, cols, summed, tile, spec, dtype, bias)


def _quantize(cols: int, dtype: torch.dtype, spec: FloatSpec, tile: Tile, power_of_two: bool, noisy: bool) -> object:
    from tilewright.ops.backends.triton import quantize

    noise = torch.zeros(256, cols, dtype=torch.int32, device=DEVICE) if noisy else None
    return quantize.quantize(_matrix(256, cols, dtype), spec, tile, power_of_two, noise)


def _turned(cols: int, dtype: torch.dtype, spec: FloatSpec, tile: Tile) -> object:
    from tilewright.ops.backends.triton import quantize

    return quantize.quantize(_matrix(cols, 256, dtype).T, spec, tile)


def _both(rows: int, cols: int, dtype: torch.dtype, spec: FloatSpec, power_of_two: bool) -> object:
    from tilewright.ops.backends.triton import quantize

    return quantize.quantize_both(_matrix(rows, cols, dtype), spec, power_of_two)


def _norm(rows: int, cols: int, dtype: torch.dtype, spec: FloatSpec) -> object:
    from tilewright.ops.backends.triton import fused

    return fused.rms_norm_quantize(_matrix(rows, cols, dtype), torch.ones(cols, device=DEVICE), 1e-5, spec)


def _swiglu(rows: int, cols: int, dtype: torch.dtype, spec: FloatSpec) -> object:
    from tilewright.ops.backends.triton import fused

    return fused.swiglu_quantize(_matrix(rows, cols, dtype), _matrix(rows, cols, dtype), spec)


def _gemm(cols: int, summed: int, tile: Tile, spec: FloatSpec, dtype: torch.dtype, bias: bool) -> object:
    from tilewright.ops.backends.triton import gemm

    def operand(number: int, tile: Tile, spec: FloatSpec) -> TiledTensor:
        codes = torch.zeros(number, summed, dtype=torch.uint8, device=DEVICE)
        return TiledTensor(codes, torch.ones(tile.grid((number, summed)), device=DEVICE), tile, spec)

    a, b = operand(256, TENSORWISE if tile == TENSORWISE else ROW_TILE, spec), operand(cols, tile, E4M3)
    return gemm.tile_gemm(a, b, torch.zeros(cols, device=DEVICE) if bias else None, dtype)


def _matrix(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(rows, cols, dtype=dtype, device=DEVICE)


def work(turn: int, workers: int, deadline: Deadline, most: int) -> dict[str, object]:
    """Every `workers`-th case, until the time is over."""
    done, failed = 0, {}
    for name, run in itertools.islice(cases(), turn, most, workers):
        if not deadline.left():
            break
        try:
            run()
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            failed[name] = f"{type(error).__name__}: {error}"[:500]
        done += 1
    return {"done": done, "failed": failed}


def main() -> None:
    """All workers, side by side; or one of them."""
    parser = parser_of(__doc__, tiny=True, seconds=True, workers=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--turn", type=int, help="for a process of its own")
    args = arguments_for_card(parser, interprets=True)
    workers = min(args.workers, 2) if args.tiny else args.workers
    most = 60 if args.tiny else sys.maxsize
    if args.turn is not None:
        print(json.dumps(work(args.turn, workers, Deadline(args.seconds), most)))
        return
    command = [sys.executable, "-m", "benchmarks.card.warm_gpu", *sys.argv[1:], "--workers", str(workers)]
    running = [
        subprocess.Popen([*command, "--turn", str(turn)], stdout=subprocess.PIPE, text=True) for turn in range(workers)
    ]
    found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    failed = {name: text for one in found for name, text in one["failed"].items()}
    total = len(list(itertools.islice(cases(), most)))
    results = {"cases": total, "done": sum(one["done"] for one in found), "workers": workers, "failed": failed}
    write_result("warm", CLAIM, results)
    print(f"{results['done']} of {total} launches compiled by {workers} processes, {len(failed)} failed", flush=True)


if __name__ == "__main__":
    main()

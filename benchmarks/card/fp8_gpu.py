"""8-bit tiles on a GPU: quantisation and matmuls, each beside BF16. The floor is written down first.

Parts, each a command of its own; results are written after every case, so that a part cut short keeps what it has:
  quantize  bandwidth of the quantisation kernels, as a share of a copy's
  gemm      the three matmuls of a linear layer with all quantisation that they need, the weight's too, against BF16's
            three with the weight's cast

Times are the device's (`device_time`): several calls between two events, queued while it was busy. The host's time for
one call stands beside them. The step is in `step_gpu`.

Floors use the rates of one H200 that were measured before: 790 TFLOP/s BF16, 4.3 TB/s; and 1,500 TFLOP/s FP8 (assumed).

python -m benchmarks.card.fp8_gpu quantize|gemm [--seconds 60] [--tiny]
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.card.device_time import CudaClock, device_ms
from benchmarks.common import Deadline, arguments_for_card, parser_of, write_result
from tilewright.core.hardware import detect_machine
from tilewright.formats.tiled import FP8_BLOCK, FP8_ROW, TiledTensor
from tilewright.ops.base.dispatch import Case, Op
from tilewright.ops.gemm import TILE_GEMM
from tilewright.ops.quantize import QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE

CLAIMS = {
    "quantize": "quantisation runs at 85 % of a copy's bandwidth or more",
    "gemm": "a linear layer's three matmuls, all quantisation included, take at most 1/1.4 of BF16's time",
}
RATES = {"bf16_flops": 790e12, "fp8_flops": 1500e12, "bytes": 4.3e12}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = ((4096, 16384), (16384, 4096), (7168, 2048), (2048, 7168), (8192, 28672))
"""(input features, output features) of linear layers."""
TOKENS = 16384


# ---- timing ----


@functools.cache
def _clock() -> CudaClock | None:
    return CudaClock() if DEVICE == "cuda" else None


def milliseconds(run: Callable[[], object]) -> dict[str, Any]:
    """The device's time for one call, see `device_ms`; on a CPU wall time, once."""
    return device_ms(run, _clock())


def errors() -> tuple[type[BaseException], ...]:
    """What a wrong guess about the card raises; recorded for the case, and the next one runs."""
    found: tuple[type[BaseException], ...] = (RuntimeError, ValueError, TypeError, AssertionError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return found
    return (*found, TritonError)


def attempt(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or the error as text."""
    try:
        return run()
    except errors() as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}


def runnable(op: Op, tiny: bool, kind: str = "") -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """(candidates that can run here by name, reasons of the others). `tiny` also takes the interpreter's kernels."""
    machine, case = detect_machine(), Case(DEVICE, torch.bfloat16, kind)
    runs, reasons = {}, {}
    for candidate in op.candidates:
        reason = candidate.why_not(machine, case)
        if reason is None or (tiny and candidate.name == "triton"):
            runs[candidate.name] = candidate.run
        else:
            reasons[candidate.name] = reason
    return runs, reasons


def random(*shape: int) -> Tensor:
    """BF16 on the device; magnitudes differ between rows, as those of activations do."""
    return (torch.randn(shape, device=DEVICE) * torch.exp2(2 * torch.randn(shape[0], 1, device=DEVICE))).bfloat16()


# ---- quantisation ----


def copy_bandwidth(size: int) -> tuple[dict[str, Any], float]:
    """Milliseconds of a copy on the device, and bytes read and written a second."""
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    taken = milliseconds(lambda: target.copy_(source))
    return taken, 2 * size / taken["median"] * 1e3


def quantize_part(tiny: bool, deadline: Deadline) -> None:
    """Bandwidth of each kernel, for the time that there is."""
    sizes = ((130, 200),) if tiny else ((TOKENS, 4096), (TOKENS, 7168), (TOKENS, 16384))
    taken, copied = copy_bandwidth(2**20 if tiny else 2**31)
    results: dict[str, Any] = {"unit": "ms", "copy_bytes_per_s": copied, "copy": taken}
    for rows, cols in sizes:
        x, up, weight = random(rows, cols), random(rows, cols), torch.ones(cols, device=DEVICE)
        elements, scales = rows * cols, rows * cols / 128 * 4
        # Op, its call, and the bytes that must move: 2 an element read or written in BF16, 1 a code, 4 a scale.
        cases: dict[str, tuple[Op, Callable[[Callable[..., Any]], object], float]] = {
            "rows": (QUANTIZE, lambda run, x=x: run(x, FP8_ROW), 3 * elements + scales),
            "blocks": (QUANTIZE, lambda run, x=x: run(x, FP8_BLOCK), 3 * elements),
            "both": (QUANTIZE_BOTH, lambda run, x=x: run(x, FP8_ROW), 4 * elements + 2 * scales),
            "norm": (
                RMS_NORM_QUANTIZE, lambda run, x=x, w=weight: run(x, w, 1e-5, FP8_ROW), 8 * elements + 2 * scales,
            ),
            "swiglu": (SWIGLU_QUANTIZE, lambda run, x=x, up=up: run(x, up, FP8_ROW), 8 * elements + 2 * scales),
        }  # fmt: skip
        for name, (op, call, moved) in cases.items():
            if deadline.passed(f"quantize, {name} {rows}x{cols}", results):
                break
            runs, reasons = runnable(op, tiny)
            results[f"{name} {rows}x{cols}"] = case = {
                "bytes": moved,
                "floor_ms": 1e3 * moved / RATES["bytes"],
                "not_run": reasons,
            }
            for candidate, run in runs.items():
                done = attempt(lambda run=run, call=call: milliseconds(functools.partial(call, run)))
                if "median" in done:
                    done["bytes_per_s"] = moved / done["median"] * 1e3
                    done["share_of_copy"] = done["bytes_per_s"] / copied
                case[candidate] = done
            say(f"{name} {rows}x{cols}", case)
            write_result("quantize", CLAIMS["quantize"], results)


# ---- matmuls ----


@dataclass(frozen=True)
class Products:
    """The three matmuls of a linear layer and what they cost at least."""

    tokens: int
    inputs: int
    outputs: int

    def floor(self) -> dict[str, float]:
        """FLOPs and bytes, and milliseconds at the given rates. Quantisation reads x and dy once and writes two copies
        of each; the weight is read in FP32 and written in 8 bits for fprop and again, transposed, for dgrad. BF16 casts
        it once."""
        flops = 3 * 2 * self.tokens * self.inputs * self.outputs
        quantised, weight = self.tokens * (self.inputs + self.outputs), self.inputs * self.outputs
        moved = 4 * quantised * (1 + 2 / 128) + 2 * 5 * weight
        matmuls, quantise = flops / RATES["fp8_flops"], moved / RATES["bytes"]
        return {
            "flops": flops,
            "quantise_bytes": moved,
            "bf16_floor_ms": 1e3 * (flops / RATES["bf16_flops"] + 6 * weight / RATES["bytes"]),
            "fp8_products_floor_ms": 1e3 * matmuls,
            "quantise_floor_ms": 1e3 * quantise,
            "fp8_floor_ms": 1e3 * (matmuls + quantise),
        }


def gemm_part(tiny: bool, deadline: Deadline) -> None:
    """The layers, one after the other, for the time that there is."""
    results: dict[str, Any] = {"unit": "ms", "rates": RATES}
    for inputs, outputs in ((200, 136),) if tiny else LAYERS:
        matmuls = Products(96 if tiny else TOKENS, inputs, outputs)
        name = f"{matmuls.tokens} tokens, {inputs} to {outputs}"
        if deadline.passed(name, results):
            break
        results[name] = case = {"roofline": matmuls.floor()}
        write_result("gemm", CLAIMS["gemm"], results)
        case |= layer(matmuls, tiny)
        say(name, case)
        write_result("gemm", CLAIMS["gemm"], results)


def layer(matmuls: Products, tiny: bool) -> dict[str, Any]:
    """BF16's three matmuls, then those of each candidate, with and without quantisation of x, dy and the weight."""
    x, dy = random(matmuls.tokens, matmuls.inputs), random(matmuls.tokens, matmuls.outputs)
    weight = random(matmuls.outputs, matmuls.inputs).float()
    low = weight.bfloat16()
    bf16, cast = milliseconds(lambda: (x @ low.T, dy @ low, dy.T @ x)), milliseconds(lambda: weight.bfloat16())
    case: dict[str, Any] = {"bf16": bf16, "bf16_cast": cast}
    case["bf16_tflops"] = matmuls.floor()["flops"] / bf16["median"] / 1e9
    both, blocks_of = (next(iter(runnable(op, tiny)[0].values())) for op in (QUANTIZE_BOTH, QUANTIZE))
    blocks, turned = blocks_of(weight, FP8_BLOCK), backward_weight(blocks_of, weight)
    (x_row, x_column), (dy_row, dy_column) = both(x, FP8_ROW), both(dy, FP8_ROW)
    case["quantize"] = milliseconds(lambda: (both(x, FP8_ROW), both(dy, FP8_ROW)))
    case["quantize_weight"] = milliseconds(lambda: (blocks_of(weight, FP8_BLOCK), backward_weight(blocks_of, weight)))
    runs, case["not_run"] = runnable(TILE_GEMM, tiny, "tiles")
    calls = {
        "fprop": lambda run: run(x_row, blocks, None, torch.bfloat16),
        "dgrad": lambda run: run(dy_row, turned, None, torch.bfloat16),
        "wgrad": lambda run: run(dy_column, x_column, None, torch.float32),
    }
    quantised, theirs = (case[name]["median"] for name in ("quantize", "quantize_weight")), bf16["median"]
    more = sum(quantised)
    for candidate, run in runs.items():
        if candidate == "ref" and not tiny:
            continue
        parts = {
            name: attempt(lambda call=call, run=run: milliseconds(functools.partial(call, run)))
            for name, call in calls.items()
        }
        case[candidate] = parts
        if all("median" in part for part in parts.values()):
            total = sum(part["median"] for part in parts.values())
            parts["tflops"] = matmuls.floor()["flops"] / total / 1e9
            parts["speedup_products"] = theirs / total
            parts["speedup_with_quantize"] = (theirs + cast["median"]) / (total + more)
    return case


def backward_weight(blocks_of: Callable[..., TiledTensor], weight_NK: Tensor) -> TiledTensor:
    """The weight as a layer's backward pass makes it: its transpose, quantised again."""
    return blocks_of(weight_NK.T, FP8_BLOCK)


def say(name: str, case: dict[str, Any]) -> None:
    """One line of a case."""
    short = {
        key: round(value["median"], 3) if isinstance(value, dict) and "median" in value else value
        for key, value in case.items()
        if key not in ("roofline", "kernels", "not_run")
    }
    print(f"{name}: {json.dumps(short, default=str)[:600]}", flush=True)


def main() -> None:
    """Run one part."""
    parser = parser_of(__doc__, tiny=True, seconds=True)
    parser.add_argument("part", choices=tuple(CLAIMS))
    args = arguments_for_card(parser, interprets=True)
    torch.manual_seed(0)
    {"quantize": quantize_part, "gemm": gemm_part}[args.part](args.tiny, Deadline(args.seconds))


if __name__ == "__main__":
    main()

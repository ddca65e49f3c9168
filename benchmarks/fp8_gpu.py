"""8-bit tiles on a GPU: quantisation, matmuls, and a training step, each beside BF16. The floor is written down first.

Parts, each a command of its own; results are written after every case, so that a part cut short keeps what it has:
  quantize  bandwidth of the quantisation kernels, as a share of a copy's
  gemm      the three matmuls of a linear layer with their quantisation, against BF16's three
  step      a training step of an 8B-shaped decoder, fp8_tile against bf16_mixed, with peak memory and a kernel table

Floors use the rates of one H200 that were measured before: 790 TFLOP/s BF16, 4.3 TB/s; and 1,500 TFLOP/s FP8 (assumed).

python -m benchmarks.fp8_gpu quantize|gemm|step [--tiny]
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import spread, write_result
from tilewright.core.hardware import detect_machine
from tilewright.formats.scaling import BLOCK_TILE, ROW_TILE
from tilewright.formats.spec import E4M3
from tilewright.formats.tiled import TiledTensor
from tilewright.ops.base.dispatch import Case, Op
from tilewright.ops.gemm import TILE_GEMM
from tilewright.ops.quantize import QUANTIZE, QUANTIZE_BOTH, RMS_NORM_QUANTIZE, SWIGLU_QUANTIZE

CLAIMS = {
    "quantize": "quantisation runs at 85 % of a copy's bandwidth or more",
    "gemm": "a linear layer's three matmuls, quantisation included, take at most 1/1.4 of BF16's time",
    "step": "an fp8_tile step of an 8B-shaped decoder takes at most 1/1.3 of a bf16_mixed step, in less memory",
}
RATES = {"bf16_flops": 790e12, "fp8_flops": 1500e12, "bytes": 4.3e12}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = ((4096, 16384), (16384, 4096), (7168, 2048), (2048, 7168), (8192, 28672))
"""(input features, output features) of linear layers."""
TOKENS = 16384


# ---- timing ----


def milliseconds(run: Callable[[], object]) -> dict[str, Any]:
    """Median and samples of the device's time for one call, after warm-up (on a CPU wall time, once)."""
    repeats, warm_up = (10, 3) if DEVICE == "cuda" else (1, 0)
    for _ in range(warm_up):
        run()
    samples = []
    for _ in range(repeats):
        if DEVICE == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            samples.append(1e3 * (time.perf_counter() - begin))
    return spread(samples)


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


def quantize_part(tiny: bool) -> None:
    """Bandwidth of each kernel."""
    sizes = ((130, 200),) if tiny else ((TOKENS, 4096), (TOKENS, 7168), (TOKENS, 16384))
    taken, copied = copy_bandwidth(2**20 if tiny else 2**31)
    results: dict[str, Any] = {"unit": "ms", "copy_bytes_per_s": copied, "copy": taken}
    for rows, cols in sizes:
        x, up, weight = random(rows, cols), random(rows, cols), torch.ones(cols, device=DEVICE)
        elements, scales = rows * cols, rows * cols / 128 * 4
        # Op, its call, and the bytes that must move: 2 an element read or written in BF16, 1 a code, 4 a scale.
        cases: dict[str, tuple[Op, Callable[[Callable[..., Any]], object], float]] = {
            "rows": (QUANTIZE, lambda run, x=x: run(x, E4M3, ROW_TILE), 3 * elements + scales),
            "blocks": (QUANTIZE, lambda run, x=x: run(x, E4M3, BLOCK_TILE), 3 * elements),
            "both": (QUANTIZE_BOTH, lambda run, x=x: run(x, E4M3), 4 * elements + 2 * scales),
            "norm": (
                RMS_NORM_QUANTIZE, lambda run, x=x, w=weight: run(x, w, 1e-5, E4M3), 8 * elements + 2 * scales,
            ),
            "swiglu": (SWIGLU_QUANTIZE, lambda run, x=x, up=up: run(x, up, E4M3), 8 * elements + 2 * scales),
        }  # fmt: skip
        for name, (op, call, moved) in cases.items():
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
        of each; the weight's is made once an optimizer step and not counted."""
        flops = 3 * 2 * self.tokens * self.inputs * self.outputs
        quantised = self.tokens * (self.inputs + self.outputs)
        moved = 4 * quantised * (1 + 2 / 128)
        matmuls, quantise = flops / RATES["fp8_flops"], moved / RATES["bytes"]
        return {
            "flops": flops,
            "quantise_bytes": moved,
            "bf16_floor_ms": 1e3 * flops / RATES["bf16_flops"],
            "fp8_products_floor_ms": 1e3 * matmuls,
            "quantise_floor_ms": 1e3 * quantise,
            "fp8_floor_ms": 1e3 * (matmuls + quantise),
        }


def gemm_part(tiny: bool) -> None:
    """The layers, one after the other."""
    results: dict[str, Any] = {"unit": "ms", "rates": RATES}
    for inputs, outputs in ((200, 136),) if tiny else LAYERS:
        matmuls = Products(96 if tiny else TOKENS, inputs, outputs)
        name = f"{matmuls.tokens} tokens, {inputs} to {outputs}"
        results[name] = case = {"roofline": matmuls.floor()}
        write_result("gemm", CLAIMS["gemm"], results)
        case |= layer(matmuls, tiny)
        say(name, case)
        write_result("gemm", CLAIMS["gemm"], results)


def layer(matmuls: Products, tiny: bool) -> dict[str, Any]:
    """BF16's three matmuls, then those of each candidate with and without the quantisation of x and dy."""
    x, dy = random(matmuls.tokens, matmuls.inputs), random(matmuls.tokens, matmuls.outputs)
    weight = random(matmuls.outputs, matmuls.inputs)
    bf16 = milliseconds(lambda: (x @ weight.T, dy @ weight, dy.T @ x))
    case: dict[str, Any] = {"bf16": bf16, "bf16_tflops": matmuls.floor()["flops"] / bf16["median"] / 1e9}
    both = next(iter(runnable(QUANTIZE_BOTH, tiny)[0].values()))
    blocks = next(iter(runnable(QUANTIZE, tiny)[0].values()))(weight, E4M3, BLOCK_TILE)
    turned = TiledTensor(blocks.qdata.T.contiguous(), blocks.scale_inv.T, BLOCK_TILE, E4M3)
    (x_row, x_column), (dy_row, dy_column) = both(x, E4M3), both(dy, E4M3)
    case["quantize"] = milliseconds(lambda: (both(x, E4M3), both(dy, E4M3)))
    case["weight_transpose"] = milliseconds(lambda: blocks.qdata.T.contiguous())
    runs, case["not_run"] = runnable(TILE_GEMM, tiny, "tiles")
    calls = {
        "fprop": lambda run: run(x_row, blocks, None, torch.bfloat16),
        "dgrad": lambda run: run(dy_row, turned, None, torch.bfloat16),
        "wgrad": lambda run: run(dy_column, x_column, None, torch.float32),
    }
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
            parts["speedup_products"] = bf16["median"] / total
            parts["speedup_with_quantize"] = bf16["median"] / (total + case["quantize"]["median"])
    return case


# ---- a training step ----


@dataclass(frozen=True)
class StepShape:
    """A decoder of 8B's width and a step of it."""

    dim: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 32768
    layers: int = 12
    rows: int = 2
    seq: int = 8192

    def roofline(self) -> dict[str, float]:
        """What a step must do, and its breakdown in ms at the given rates. Floors: the real parts take longer."""
        tokens = self.rows * self.seq
        kv = self.dim * self.kv_heads // self.heads
        weights = self.layers * self.dim * (2 * self.dim + 2 * kv + 3 * self.ffn)
        linear = 6 * tokens * weights
        head = 6 * tokens * self.vocab * self.dim
        attention = 3.5 * 2 * self.rows * self.seq**2 * self.dim * self.layers  # causal: half of the square
        wide = self.layers * tokens * (6 * self.dim + 2 * kv + 3 * self.ffn)
        quantised = 4 * wide  # inputs (shared ones once) and output gradients: 2 bytes read, 2 x 1 written
        elementwise = self.layers * tokens * 2 * (16 * self.dim + 8 * self.ffn)
        parameters = weights + self.vocab * self.dim
        optimizer = 28 * parameters  # FP32 weight, gradient and moments: four read, three written
        low, high, speed = RATES["bf16_flops"], RATES["fp8_flops"], RATES["bytes"]
        parts = {
            "linear_bf16_ms": linear / low,
            "linear_fp8_ms": linear / high,
            "quantise_ms": quantised / speed,
            "attention_ms": attention / low,
            "head_ms": head / low,
            "elementwise_ms": elementwise / speed,
            "optimizer_ms": optimizer / speed,
        }
        parts = {name: 1e3 * seconds for name, seconds in parts.items()}
        shared = sum(parts[name] for name in ("attention_ms", "head_ms", "elementwise_ms", "optimizer_ms"))
        low_step = shared + parts["linear_bf16_ms"]
        high_step = shared + parts["linear_fp8_ms"] + parts["quantise_ms"]
        return {
            "linear_flops": linear,
            "attention_flops": attention,
            "head_flops": head,
            "optimizer_bytes": optimizer,
            **parts,
            "bf16_step_floor_ms": low_step,
            "fp8_step_floor_ms": high_step,
            "best_speedup": low_step / high_step,
        }


TINY = StepShape(dim=128, heads=4, kv_heads=2, ffn=256, vocab=512, layers=2, rows=1, seq=64)
CONTENDERS = ("bf16_mixed", "fp8_tile", "fp8_hybrid", "torchao_tensorwise", "torchao_rowwise")


def step_part(tiny: bool, names: tuple[str, ...]) -> None:
    """Each contender in a process of its own; fewer layers for all when one does not fit."""
    shape = TINY if tiny else StepShape()
    results: dict[str, Any] = {"unit": "ms per step", "rates": RATES}
    while shape.layers > 0:
        results |= {"shape": asdict(shape), "roofline": shape.roofline()}
        write_result("step", CLAIMS["step"], results)
        for name in names:
            results[name] = contender = worker(name, shape, tiny)
            say(name, contender)
            if "bf16_mixed" in results and "median" in contender.get("step", {}) and name != "bf16_mixed":
                theirs = results["bf16_mixed"]
                if "step" in theirs:
                    contender["speedup"] = theirs["step"]["median"] / contender["step"]["median"]
                    contender["peak_share"] = contender["peak_bytes"] / max(theirs["peak_bytes"], 1)
            write_result("step", CLAIMS["step"], results)
            if "out of memory" in contender.get("error", "").lower():
                break
        else:
            return
        shape = StepShape(**{**asdict(shape), "layers": shape.layers // 2})
        for name in names:
            results.pop(name, None)


def worker(name: str, shape: StepShape, tiny: bool) -> dict[str, Any]:
    """Run one contender in a new process, so that its peak memory is its own."""
    command = [sys.executable, "-m", "benchmarks.fp8_gpu", "step", "--worker", name]
    command += ["--shape", json.dumps(asdict(shape))]
    done = subprocess.run(command + ["--tiny"] * tiny, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return {"error": f"exit code {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"}
    return json.loads(lines[-1])


def contend(name: str, shape: StepShape, tiny: bool) -> dict[str, Any]:
    """Warm up, time steps, record the peak, then look at two steps with the profiler."""
    try:
        step = make_step(name, shape, compiled=not tiny)
    except ImportError as error:
        return {"not_run": f"{error.name} cannot be imported"}
    start = time.perf_counter()
    for _ in range(3):
        step()
    synchronize()
    warm_up = time.perf_counter() - start
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    samples = []
    for _ in range(2 if tiny else 8):
        start = time.perf_counter()
        step()
        synchronize()
        samples.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    median = statistics.median(samples)
    return {
        "warm_up_s": warm_up,
        "step": spread(samples),
        "tokens_per_s": shape.rows * shape.seq / median * 1e3,
        "peak_bytes": peak,
        "kernels": kernel_table(step, median),
    }


def synchronize() -> None:
    """Wait for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def make_step(name: str, shape: StepShape, *, compiled: bool) -> Callable[[], object]:
    """A function that takes one training step of tilewright's decoder in a mode, or converted by torchao."""
    from tilewright.core.config.sections.model import ModelSection
    from tilewright.models.build import build_model, init_weights
    from tilewright.ops.kernels import Kernels
    from tilewright.optim.adam import DeepSeekAdam
    from tilewright.optim.clip import GradClip
    from tilewright.optim.param_groups import decay_groups
    from tilewright.precision.convert import convert
    from tilewright.precision.float8.weight_cache import QuantizedWeights
    from tilewright.training.executor.standard import StandardExecutor

    kernels = Kernels(detect_machine(), compile=compiled)
    section = ModelSection(
        dim=shape.dim, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads, ffn_dim=shape.ffn
    )  # fmt: skip
    model = build_model(section, shape.vocab, kernels, DEVICE)
    init_weights(model, 0)
    theirs = name.startswith("torchao_")
    convert(model, "bf16_mixed" if theirs else name, kernels=kernels)
    if theirs:
        to_torchao(model, name.removeprefix("torchao_"))
    if compiled:
        model.compile_blocks()
    optimizer = DeepSeekAdam(decay_groups(model, 0.1), lr=1e-4, kernels=kernels)
    QuantizedWeights(model, optimizer)
    executor = StandardExecutor(model, optimizer, clip=GradClip(1.0), device=DEVICE)
    ids = torch.randint(0, shape.vocab, (shape.rows, shape.seq + 1))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
    return lambda: executor.step([batch], lr=1e-4)


def to_torchao(model: torch.nn.Module, recipe: str) -> None:
    """torchao's linear layers inside the decoder's blocks, under BF16 autocast of the input that they are given."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    for block in model.modules():
        if isinstance(block, torch.nn.ModuleList):
            for child in block.modules():
                if isinstance(child, torch.nn.Linear):
                    child.__class__ = torch.nn.Linear  # torchao swaps torch's own class only
            convert_to_float8_training(block, config=config)


def kernel_table(step: Callable[[], object], step_ms: float) -> dict[str, Any]:
    """The kernels (operations on a CPU) that take the most time in one step, and the share of none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        step()
        synchronize()
    rows = []
    for event in profiler.key_averages():
        if DEVICE == "cuda":  # kernels only: the operations that launched them report the same time again
            own = event.self_device_time_total if event.device_type == torch.autograd.DeviceType.CUDA else 0
        else:
            own = event.self_cpu_time_total
        if own > 0:
            rows.append({"name": event.key[:120], "calls": event.count / 2, "ms": own / 2e3})
    rows.sort(key=lambda row: -row["ms"])
    busy = sum(row["ms"] for row in rows)
    return {"busy_ms": busy, "idle_share": max(0.0, 1 - busy / step_ms), "top": rows[:40]}


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
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=tuple(CLAIMS))
    parser.add_argument("--tiny", action="store_true", help="small sizes; on a CPU with Triton's interpreter")
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if DEVICE == "cpu" and not args.tiny:
        raise SystemExit("benchmarks.fp8_gpu: no CUDA device here; --tiny runs small sizes on a CPU")
    if DEVICE == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    torch.manual_seed(0)
    if args.worker:
        print(json.dumps(attempt(lambda: contend(args.worker, StepShape(**args.shape), args.tiny))))
    elif args.part == "step":
        step_part(args.tiny, tuple(args.contenders))
    else:
        {"quantize": quantize_part, "gemm": gemm_part}[args.part](args.tiny)


if __name__ == "__main__":
    main()

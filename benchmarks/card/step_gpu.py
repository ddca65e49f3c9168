"""A training step of an 8B-shaped decoder on a GPU: FP8 tiles beside BF16 and torchao, with peak memory and kernels.

The number of layers is chosen from the device's memory before anything runs, so that the contender that needs most
fits. Each is a process of its own, ended when its share of the time is over; results are written after each.

python -m benchmarks.card.step_gpu [--contenders bf16_mixed fp8_tile ...] [--seconds 170] [--tiny]
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.card.fp8_gpu import DEVICE, RATES, attempt, say
from benchmarks.common import Deadline, arguments_for_card, parser_of, spread, write_result
from benchmarks.loops import random_decoder, standard_executor, token_batch
from benchmarks.worker import call_worker, out_of_memory
from tilewright.core.hardware import detect_machine

CLAIM = "an fp8_tile step of an 8B-shaped decoder takes at most 1/1.3 of a bf16_mixed step, in less memory"


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

    def peak_bytes(self) -> int:
        """An estimate of what `bf16_mixed` needs: FP32 weights, gradients and two moments, BF16 weights of the pass,
        what compiled layers keep in BF16, the head's logits of a chunk and its gradient."""
        kv = self.dim * self.kv_heads // self.heads
        layer = self.dim * (2 * self.dim + 2 * kv + 3 * self.ffn)
        parameters = self.layers * layer + self.vocab * self.dim
        kept = self.rows * self.seq * (8 * self.dim + 4 * kv + 3 * self.ffn) * 2
        return 16 * parameters + 2 * self.layers * layer + self.layers * kept + 2 * kept + HEAD_BYTES

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


USABLE = 0.9
"""Of a device's memory: the rest is the context's, and what an allocator leaves between blocks."""
HEAD_BYTES = 4 * 2**30
TINY = StepShape(dim=128, heads=4, kv_heads=2, ffn=256, vocab=512, layers=2, rows=1, seq=64)
CONTENDERS = ("bf16_mixed", "fp8_tile", "fp8_hybrid", "torchao_tensorwise", "torchao_rowwise")


def fitting(shape: StepShape, memory_bytes: int) -> StepShape:
    """As many layers as fit into a device, an even number."""
    layers = shape.layers
    while layers > 2 and replace(shape, layers=layers).peak_bytes() > USABLE * memory_bytes:
        layers -= 2
    return replace(shape, layers=layers)


def step_part(shape: StepShape, names: tuple[str, ...], deadline: Deadline, tiny: bool) -> None:
    """Each contender in a process of its own. Where one does not fit in spite of the estimate, those after it and it
    run with fewer layers, and what was measured before stays under `with_more_layers`."""
    results: dict[str, Any] = {"unit": "ms per step", "rates": RATES}
    while True:
        results |= {"shape": asdict(shape), "roofline": shape.roofline(), "estimated_peak_bytes": shape.peak_bytes()}
        write_result("step", CLAIM, results)
        for index, name in enumerate(names):
            if deadline.passed(name, results):
                return write_result("step", CLAIM, results)
            found = call_worker(
                "card.step_gpu", "--worker", name, "--shape", json.dumps(asdict(shape)), *["--tiny"] * tiny,
                timeout_s=deadline.share(len(names) - index),
            )  # fmt: skip
            results[name] = compared(name, found, results.get("bf16_mixed", {}))
            say(name, results[name])
            write_result("step", CLAIM, results)
            if out_of_memory(found) and shape.layers > 2:
                break
        else:
            return None
        results["with_more_layers"] = {"layers": shape.layers} | {
            name: results.pop(name) for name in names if name in results
        }
        shape = replace(shape, layers=shape.layers // 2)


def compared(name: str, found: dict[str, Any], bf16: dict[str, Any]) -> dict[str, Any]:
    """What a contender gave, beside BF16's step where there is one."""
    if name != "bf16_mixed" and "step" in found and "step" in bf16:
        found["speedup"] = bf16["step"]["median"] / found["step"]["median"]
        found["peak_share"] = found["peak_bytes"] / max(bf16["peak_bytes"], 1)
    return found


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
    from tilewright.ops.kernels import Kernels
    from tilewright.precision.convert import convert

    kernels = Kernels(detect_machine(), compile=compiled)
    sizes = {"dim": shape.dim, "num_layers": shape.layers, "num_heads": shape.heads, "num_kv_heads": shape.kv_heads}
    model = random_decoder(shape.vocab, kernels, DEVICE, **sizes, ffn_dim=shape.ffn)
    theirs = name.startswith("torchao_")
    convert(model, "bf16_mixed" if theirs else name, kernels=kernels)
    if theirs:
        to_torchao(model, name.removeprefix("torchao_"))
    executor = standard_executor(model, kernels, DEVICE, compiled=compiled, lr=1e-4)
    batch = token_batch(shape.vocab, shape.rows, shape.seq, 0)
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


def main() -> None:
    """Run all contenders, or one of them."""
    parser = parser_of(__doc__, tiny=True, seconds=True)
    parser.add_argument("--contenders", nargs="*", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--worker", choices=CONTENDERS, help="for a process of its own")
    parser.add_argument("--shape", type=json.loads, help="for a process of its own")
    args = arguments_for_card(parser, interprets=True)
    torch.manual_seed(0)
    if args.worker:
        print(json.dumps(attempt(lambda: contend(args.worker, StepShape(**args.shape), args.tiny))))
        return
    shape = TINY if args.tiny else fitting(StepShape(), torch.cuda.get_device_properties(0).total_memory)
    step_part(shape, tuple(args.contenders), Deadline(args.seconds), args.tiny)


if __name__ == "__main__":
    main()

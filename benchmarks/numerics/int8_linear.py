"""INT8 linear layers on a CPU in process: each kernel beside torch's FP32 and BF16 linear, in turns, by tokens.

python -m benchmarks.numerics.int8_linear [--rounds 15] [--threads 1]
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import machine_kind, spread, write_result
from benchmarks.turns import in_turns, ratio
from tilewright.core.hardware import detect_machine
from tilewright.ops.base.dispatch import Case
from tilewright.ops.int8_linear import INT8_LINEAR
from tilewright.precision.integer.linear import Int8Linear

CLAIM = "a linear layer in INT8 is faster than in FP32 and BF16, eager, at 1, 32 and 256 tokens"
SHAPES = ((1024, 4096), (512, 1408))
TOKENS = (1, 32, 256)


def measure(num_in: int, num_out: int, tokens: int, rounds: int) -> dict[str, object]:
    """Milliseconds of each, in turns, and how much faster INT8 is."""
    layer = nn.Linear(num_in, num_out)
    narrow = nn.Linear(num_in, num_out, dtype=torch.bfloat16)
    x = torch.randn(tokens, num_in)
    x_bf16 = x.bfloat16()
    runs: dict[str, Callable[[], object]] = {"fp32": lambda: layer(x), "bf16": lambda: narrow(x_bf16)}
    machine = detect_machine("cpu")
    for candidate in INT8_LINEAR.candidates:
        if candidate.name != "ref" and candidate.why_not(machine, Case("cpu", torch.float32)) is None:
            fast = Int8Linear.from_linear(layer, machine, candidate.name)
            runs[candidate.name] = lambda fast=fast: fast(x)
    with torch.no_grad():
        seconds = in_turns(runs, rounds)
    samples = {name: [1e3 * taken for taken in each] for name, each in seconds.items()}
    result: dict[str, object] = {name: spread(times) for name, times in samples.items()}
    best = min(
        (name for name in samples if name not in ("fp32", "bf16")), key=lambda name: sorted(samples[name])[rounds // 2]
    )
    for base in ("fp32", "bf16"):
        result[f"speedup of {best} over {base}"] = ratio(samples[base], samples[best])
    return result


def main() -> None:
    """Run all shapes and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, object] = {"unit": "ms, forward, eager", "threads": args.threads}
    for num_in, num_out in SHAPES:
        for tokens in TOKENS:
            name = f"{num_in} -> {num_out}, {tokens} tokens"
            results[name] = row = measure(num_in, num_out, tokens, args.rounds)
            print(f"{name:<28}", "  ".join(f"{k} {v['median']:.3f}" for k, v in row.items()))  # type: ignore[index]
    write_result(f"int8_linear_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()

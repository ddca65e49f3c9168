"""Attention that sees all earlier positions, a window of them, or a state: processor seconds, forward and backward.

    python -m benchmarks.serving.attention_forms

Prints a row for each length: milliseconds of one thread, 8 heads of 64 in FP32 on a CPU, and of each form its time over
what its FLOPs (`models.decoder.flops`) take at the rate of the first one. No result is kept: docs/log.md has one of a
busy machine.
"""

import argparse
import time
from collections.abc import Callable

import torch

from tilewright.core.hardware import detect_machine
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.flops import count_flops
from tilewright.ops.kernels import Kernels

HEADS, WIDTH, WINDOW = 8, 64, 128


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The least processor time of a call."""
    work()
    found = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def row(length: int, rounds: int) -> str:
    """All forms at one length."""
    kernels = Kernels(detect_machine("cpu"))
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
    decay, rate = (torch.randn(1, HEADS, length, requires_grad=True) for _ in range(2))
    forms: dict[str, tuple[dict[str, object], Callable[[], torch.Tensor]]] = {
        "whole": ({}, lambda: kernels.attention(q, k, v)),
        f"window of {WINDOW}": ({"sliding_window": WINDOW}, lambda: kernels.attention(q, k, v, window=WINDOW)),
        "linear": ({"attention": "linear"}, lambda: kernels.linear_attention(q, k, v, decay, rate)),
    }
    shape = {"vocab_size": 64, "dim": HEADS * WIDTH, "num_heads": HEADS, "num_layers": 1}
    took, rates = {}, {}
    for name, (changes, form) in forms.items():
        took[name] = seconds(lambda form=form: form().sum().backward(), rounds)
        rates[name] = count_flops(DecoderConfig.of(**shape | changes), length).attention[0] * length / took[name]
    cells = (f"{name} {1e3 * took[name]:.1f} ms (x {rates['whole'] / rates[name]:.1f})" for name in forms)
    return f"{length} positions: " + ", ".join(cells)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for length in (512, 1024, 2048, 4096):
        print(row(length, rounds), flush=True)


if __name__ == "__main__":
    main()

"""A training step in fp8_tile beside the same in bf16_mixed: seconds, and bytes kept for backward, layers compiled.

Both models live in one process and take steps in turns, so that each round compares them under the same conditions. The
inputs of linear layers are what autograd saves for a stack of linear layers alone; the memory tracker's activations are
those of the whole step. A CPU decodes the 8-bit operands to BF16 and multiplies those, so a step cannot be faster.

python -m benchmarks.numerics.fp8_step [--dim 1024] [--rounds 7]
"""

import argparse
import time

import torch

from benchmarks.common import machine_kind, restart_tuned, spread, write_result
from benchmarks.loops import random_decoder, standard_executor, token_batch
from benchmarks.turns import ratio
from tilewright.core.hardware import detect_machine
from tilewright.memory.tracking.tracker import MemoryTracker
from tilewright.ops.kernels import Kernels
from tilewright.precision.convert import convert
from tilewright.training.executor.standard import StandardExecutor

CLAIM = "an fp8_tile step takes at most 1.35x a bf16_mixed step on a CPU, and keeps 45 % less of linear inputs"
ROWS, SEQ, VOCAB, LAYERS = 8, 512, 8192, 4


def make_executor(mode: str, dim: int) -> tuple[StandardExecutor, MemoryTracker]:
    """Model, precision, optimizer and executor, as a run builds them."""
    kernels = Kernels(machine := detect_machine())
    model = random_decoder(VOCAB, kernels, machine.device, dim=dim, num_layers=LAYERS, num_heads=dim // 64)
    tracker = MemoryTracker(machine.device)
    executor = standard_executor(model, kernels, machine.device, mode=mode, memory_tracker=tracker)
    tracker.watch(model)
    return executor, tracker


def linear_input_bytes(mode: str, dim: int) -> int:
    """Bytes that a chain of two linear layers keeps for backward, parameters left out."""
    layers = torch.nn.Sequential(torch.nn.Linear(dim, 4 * dim, bias=False), torch.nn.Linear(4 * dim, dim, bias=False))
    convert(layers, mode, kernels=Kernels.default())
    own = {parameter.untyped_storage()._cdata for parameter in layers.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    weight_copies = 0 if mode.startswith("fp8") else sum(2 * parameter.numel() for parameter in layers.parameters())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layers(torch.randn(ROWS * SEQ, dim, dtype=torch.bfloat16, requires_grad=True))
    total = sum(storage.nbytes() for storage in kept.values()) - weight_copies
    del out
    return total


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    restart_tuned()
    modes = ("bf16_mixed", "fp8_tile")
    made = {mode: make_executor(mode, args.dim) for mode in modes}
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    activations: dict[str, int] = {}
    for turn in range(args.rounds + 2):
        for mode, (executor, memory_tracker) in made.items():
            start = time.perf_counter()
            executor.step([token_batch(VOCAB, ROWS, SEQ, turn)], lr=3e-4)
            if turn >= 2:
                seconds[mode].append(time.perf_counter() - start)
            phases = memory_tracker.snapshot(executor.model, executor.optimizer)["phase_owners"]
            activations[mode] = phases["forward"]["activations"]
    inputs = {mode: linear_input_bytes(mode, args.dim) for mode in modes}
    results = {
        "unit": "seconds per step",
        "shape": {"dim": args.dim, "layers": LAYERS, "rows": ROWS, "seq_len": SEQ, "vocab": VOCAB},
        **{mode: spread(times) for mode, times in seconds.items()},
        "ratio": ratio(seconds["fp8_tile"], seconds["bf16_mixed"]),
        "linear_input_bytes": inputs,
        "linear_input_saving_percent": 100 * (1 - inputs["fp8_tile"] / inputs["bf16_mixed"]),
        "ledger_activation_bytes": activations,
        "ledger_activation_saving_percent": 100 * (1 - activations["fp8_tile"] / activations["bf16_mixed"]),
    }
    print(f"ratio {results['ratio']['median']:.3f}, linear inputs -{results['linear_input_saving_percent']:.1f} %, ")
    print(f"activations in the memory tracker -{results['ledger_activation_saving_percent']:.1f} %")
    write_result(f"fp8_step_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()

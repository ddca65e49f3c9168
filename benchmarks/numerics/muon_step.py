"""A training step with Muon beside the same with AdamW: seconds, and those of the update alone, layers compiled.

Both models live in one process and take steps in turns, the order changed in every round, so that each round compares
them under the same conditions. The model is the default recipe's, with a vocabulary of 4096, and 4096 tokens per step:
with more tokens, or more micro-batches, the update is a smaller part of a step.

On a CUDA device the model is wider (1024, 12 layers, a vocabulary of 32768, 16,384 tokens): the default one would
measure launches of kernels.

python -m benchmarks.numerics.muon_step [--rounds 15] [--tiny]
"""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common import Deadline, Stolen, machine_kind, parser_of, restart_tuned, spread, write_result
from benchmarks.loops import token_batch
from benchmarks.turns import ratio
from tilewright.core.config.load import load_recipe
from tilewright.core.config.recipe import Recipe
from tilewright.core.hardware import detect_machine
from tilewright.models.build import build_model, init_weights
from tilewright.ops.kernels import Kernels
from tilewright.optim.clip import GradClip
from tilewright.precision.convert import convert
from tilewright.training.components.optimizer import make_optimizer
from tilewright.training.executor.standard import StandardExecutor

CLAIM = "a step with Muon takes at most 1.15x a step with AdamW (default model, 4096 tokens per step)"
KINDS = ("adamw", "muon")


@dataclass(frozen=True)
class Shape:
    """The model, and the rows of a step."""

    dim: int = 256
    layers: int = 6
    heads: int = 4
    vocab: int = 4096
    rows: int = 8
    seq: int = 512


DEFAULT, ON_CUDA, TINY = Shape(), Shape(1024, 12, 16, 32768, 8, 2048), Shape(64, 2, 2, 512, 2, 32)


def recipe_of(kind: str, shape: Shape) -> Recipe:
    """The default recipe with one optimizer."""
    settings = {
        "model.dim": shape.dim, "model.num_layers": shape.layers, "model.num_heads": shape.heads, "optim.kind": kind,
    }  # fmt: skip
    return load_recipe("default", {name: str(value) for name, value in settings.items()}, environ={}).recipe


class Timed:
    """Model, optimizer and executor as a run builds them; the seconds of its steps, and of their updates."""

    def __init__(self, kind: str, shape: Shape) -> None:
        machine, recipe = detect_machine(), recipe_of(kind, shape)
        kernels = Kernels(machine)
        self.shape, self.device = shape, machine.device
        model = build_model(recipe.model, shape.vocab, kernels, machine.device)
        init_weights(model, 0)
        convert(model, recipe.precision.mode, kernels=kernels)
        model.compile_blocks()
        optimizer = make_optimizer(recipe.optim, model.train(), kernels, 0)
        optimizer.register_step_pre_hook(lambda *_: self._mark())
        optimizer.register_step_post_hook(lambda *_: self.update_s.append(self._now() - self._began))
        self.executor = StandardExecutor(model, optimizer, clip=GradClip(1.0), device=machine.device)
        self.step_s: list[float] = []
        self.update_s: list[float] = []

    def step(self, number: int) -> None:
        """One step on random tokens."""
        batch = token_batch(self.shape.vocab, self.shape.rows, self.shape.seq, number)
        began = self._now()
        self.executor.step([batch], 1e-3)
        self.step_s.append(self._now() - began)

    def _mark(self) -> None:
        self._began = self._now()

    def _now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    """Measure, and write the result."""
    parser = parser_of(__doc__, tiny=True, seconds=True, rounds=15)
    args = parser.parse_args()
    rounds = min(args.rounds, 2) if args.tiny else args.rounds
    restart_tuned()
    torch.set_num_threads(detect_machine().physical_cores)
    deadline = Deadline(args.seconds)
    shape = TINY if args.tiny else ON_CUDA if torch.cuda.is_available() else DEFAULT
    timed = {kind: Timed(kind, shape) for kind in KINDS}
    for number in range(3):  # compiles, and makes the states
        for one in timed.values():
            one.step(number)
    for one in timed.values():
        one.step_s.clear()
        one.update_s.clear()
    with Stolen() as stolen:
        for number in range(rounds):
            if number and not deadline.left():
                break
            for kind in KINDS if number % 2 else reversed(KINDS):
                timed[kind].step(number)
    results: dict[str, Any] = {
        "step_s": {kind: spread(one.step_s) for kind, one in timed.items()},
        "update_s": {kind: spread(one.update_s) for kind, one in timed.items()},
        "muon_over_adamw": ratio(timed["muon"].step_s, timed["adamw"].step_s),
        "shape": asdict(shape),
        "rounds": len(timed["muon"].step_s),
        "stolen_share": round(stolen.share, 4),
    }
    for kind in KINDS:
        step, update = results["step_s"][kind], results["update_s"][kind]
        print(f"{kind}: step {step['median']:.3f} s, update {update['median']:.4f} s")
    print(f"ratio {results['muon_over_adamw']['median']:.3f}")
    write_result(f"muon_step_{'tiny' if args.tiny else machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()

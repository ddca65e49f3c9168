"""Loss of training with gradients that two ranks send each other as BF16 and as FP8, with and without error feedback.

A small transformer in FP32 (two layers of width 64, bytes, 131,000 parameters) on text of this repository, in pairs:
equal weights, rows and rates, only the wire format differs. All runs are trained at once, as one model with an axis of
runs, [A, ...]: no run sees another. What two ranks send each other is computed by one process (`reduced_together`; a
test compares its bits with those of processes); each has half of the rows.

The measure was settled before the runs. Compared are the weights' mean over the last quarter of the steps, on
held-out rows of the same kind of text (every sixteenth block of 4 KiB), within each seed. Over the seeds their mean
difference has a 95 % interval (Student's t): inside of +-0.25 % FP8 is "within", outside "beyond", else "undecided".
A control, BF16 whose first weights differ in one bit, says what such a difference is where no format differs.

A position reads the byte before it beside its own. Without it each run stood on a plateau until its attention had
found that byte, some of them to the end, and pairs were apart by 1 % for that alone.

python -m benchmarks.ranks.sync_loss --steps 2000 --seeds 8

Legend: A runs  B rows  S positions  D width  H heads  F hidden width  V bytes.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import write_result
from benchmarks.ranks.exchanges import reduced_together
from tilewright.core.hardware import detect_machine
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.feedback import ErrorFeedback

CLAIM = "FP8 gradients on the wire end within 0.25 % of the loss of BF16 ones"
RANKS, ROWS, LENGTH, LIMIT, LR = 2, 2, 64, 0.0025, 3e-3
WIDTH, HEADS, HIDDEN, LAYERS, BYTES = 64, 4, 192, 2, 256
CONTROL = "bf16, another bit"
WAYS: dict[str, tuple[Any, bool]] = {
    "bf16": ("bf16", False), CONTROL: ("bf16", False), "fp8": ("fp8", False), "fp8, feedback": ("fp8", True)
}  # fmt: skip
HELD_OUT_ROWS, BLOCK, EVERY = 1024, 4096, 16
SHAPES = {"norm_1": (WIDTH,), "qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "norm_2": (WIDTH,),
          "gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}  # fmt: skip
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t of a two-sided 95 % interval, of 1 to 15 degrees of freedom."""


def text() -> tuple[Tensor, Tensor]:
    """Bytes of the repository's own documents and sources, in the order of their names: to train on, and held out."""
    root = Path(__file__).parents[2]
    paths = sorted([*(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")])
    ids = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()
    blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % EVERY == 0
    return blocks[~held].flatten(), blocks[held].flatten()


def rows(ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Bytes from anywhere in the text, and the one that follows the last [count, LENGTH + 1]."""
    begins = torch.randint(0, len(ids) - LENGTH - 1, (count, 1), generator=generator)
    return ids[begins + torch.arange(LENGTH + 1)]


def initial(seed: int) -> dict[str, Tensor]:
    """The weights of a run."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (BYTES, WIDTH), "before": (BYTES, WIDTH), "positions": (LENGTH, WIDTH), "norm": (WIDTH,)}
    shapes |= {f"{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    return {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


def losses(params: dict[str, Tensor], ids_ABS: Tensor) -> Tensor:
    """Of each run on its rows, in nats [A]."""
    runs, batch, length = len(ids_ABS), ids_ABS.shape[1], ids_ABS.shape[2] - 1

    def norm(x_ATD: Tensor, name: str) -> Tensor:
        return F.rms_norm(x_ATD, (WIDTH,)) * params[name][:, None]

    def linear(x_ATD: Tensor, name: str) -> Tensor:
        return x_ATD @ params[name].transpose(1, 2)

    def rows_of(name: str, read_ABS: Tensor) -> Tensor:
        return params[name].gather(1, read_ABS.flatten(1)[..., None].expand(-1, -1, WIDTH))

    read_ABS = ids_ABS[..., :-1]
    x_ATD = rows_of("embedding", read_ABS) + rows_of("before", F.pad(read_ABS, (1, 0))[..., :-1])
    x_ATD = x_ATD + params["positions"].repeat(1, batch, 1)
    for layer in range(LAYERS):
        qkv = linear(norm(x_ATD, f"{layer}.norm_1"), f"{layer}.qkv").view(runs * batch, length, 3, HEADS, -1)
        out = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x_ATD = x_ATD + linear(out.transpose(1, 2).reshape(runs, batch * length, WIDTH), f"{layer}.out")
        gate, up = linear(norm(x_ATD, f"{layer}.norm_2"), f"{layer}.gate_up").chunk(2, -1)
        x_ATD = x_ATD + linear(F.silu(gate) * up, f"{layer}.down")
    logits_ATV = linear(norm(x_ATD, "norm"), "embedding")
    targets = ids_ABS[..., 1:].flatten()
    return F.cross_entropy(logits_ATV.flatten(0, 1), targets, reduction="none").view(runs, -1).mean(1)


def interval(found: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of some numbers: its middle, and half of its width.

    Example:
        >>> middle, half = interval([1.0, 2.0, 3.0])
        >>> middle, round(half, 3)
        (2.0, 2.484)
    """
    spread = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
    return statistics.mean(found), T_95[min(len(found) - 1, len(T_95)) - 1] * spread


def verdict(middle: float, half: float, limit: float = LIMIT) -> str:
    """What an interval says of a limit either way.

    Example:
        >>> verdict(0.001, 0.001), verdict(0.004, 0.001), verdict(0.002, 0.001)
        ('within', 'beyond', 'undecided')
    """
    if abs(middle) + half <= limit:
        return "within"
    return "beyond" if abs(middle) - half > limit else "undecided"


class Ranks:
    """The exchange of two ranks' gradients of the runs of one way: each run's parameter begins with a tile."""

    def __init__(self, way: str, kernels: Kernels) -> None:
        (self._wire, fed), self._kernels = WAYS[way], kernels
        self._feedback = [ErrorFeedback() for _ in range(RANKS)] if fed else None

    def sum(self, grads: list[list[Tensor]]) -> list[Tensor]:
        """The sum of the ranks' gradients, by parameter."""
        flats = [torch.cat([_tiles(grad) for grad in of_rank], 1) for of_rank in grads]
        total = reduced_together([flat.flatten() for flat in flats], self._wire, self._kernels, self._feedback)
        for feedback in self._feedback or ():
            feedback.commit()
        parts = total.view_as(flats[0]).split([_tiles(grad).shape[1] for grad in grads[0]], 1)
        pairs = zip(parts, grads[0], strict=True)
        return [part[:, : grad[0].numel()].reshape(grad.shape) for part, grad in pairs]

    def lost(self) -> list[dict[str, Tensor]]:
        """What the ranks owe."""
        return [dict(feedback.tensors()) for feedback in self._feedback or ()]

    def load(self, lost: list[dict[str, Tensor]]) -> None:
        """Go on from `lost()`."""
        for feedback, tensors in zip(self._feedback or (), lost, strict=True):
            feedback.load(tensors)


def _tiles(grad: Tensor) -> Tensor:
    flat = grad.flatten(1)
    return F.pad(flat, (0, -flat.shape[1] % 128))


@torch.no_grad()
def held_out(params: dict[str, Tensor], ids: Tensor) -> list[float]:
    """The loss of each run on the same held-out rows."""
    generator, runs = torch.Generator().manual_seed(0), len(params["norm"])
    batches = [rows(ids, 32, generator) for _ in range(HELD_OUT_ROWS // 32)]
    found = [losses(params, batch.expand(runs, -1, -1)) for batch in batches]
    return torch.stack(found).double().mean(0).tolist()


def train(
    seeds: int, steps: int, ids: tuple[Tensor, Tensor], state: Path | None = None
) -> dict[str, list[dict[str, float]]]:
    """Of each way and seed: held-out losses of averaged and last weights, and the mean loss of the last steps.

    Args:
        seeds, steps: how many.
        ids: to train on, and held out.
        state: kept there every hundred steps, and gone on from.
    """
    kernels = Kernels(detect_machine("cpu"), compile=False)
    first = [initial(seed) for seed in range(seeds)]
    params = {name: torch.stack([one[name] for one in first] * len(WAYS)).requires_grad_() for name in first[0]}
    other = params["embedding"].data[list(WAYS).index(CONTROL) * seeds :][:seeds, 0, 0]
    other.copy_(torch.nextafter(other, torch.ones_like(other)))
    optimizer = torch.optim.AdamW(list(params.values()), lr=LR, betas=(0.9, 0.95))
    exchanges = [Ranks(way, kernels) for way in WAYS]
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    sums = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in params.items()}
    told: list[Tensor] = []
    if state is not None and state.exists():
        kept = torch.load(state, weights_only=True)
        for name, param in params.items():
            param.data.copy_(kept["params"][name])
        optimizer.load_state_dict(kept["optimizer"])
        sums, told = kept["sums"], kept["told"]
        for generator, one in zip(generators, kept["generators"], strict=True):
            generator.set_state(one)
        for exchange, lost in zip(exchanges, kept["lost"], strict=True):
            exchange.load(lost)
    for step in range(len(told), steps):
        grads, total = [], torch.zeros(len(WAYS) * seeds)
        for _ in range(RANKS):
            ids_ABS = torch.stack([rows(ids[0], ROWS, generator) for generator in generators] * len(WAYS))
            loss_A = losses(params, ids_ABS) / RANKS
            grads.append(torch.autograd.grad(loss_A.sum(), list(params.values())))
            total += loss_A.detach()
        for number, exchange in enumerate(exchanges):
            mine = slice(number * seeds, (number + 1) * seeds)
            summed = exchange.sum([[grad[mine] for grad in of_rank] for of_rank in grads])
            for grad, value in zip(grads[0], summed, strict=True):
                grad[mine] = value
        norm_A = torch.stack([grad.flatten(1).square().sum(1) for grad in grads[0]]).sum(0).sqrt()
        for param, grad in zip(params.values(), grads[0], strict=True):
            param.grad = grad * (1.0 / norm_A).clamp(max=1.0).view(-1, *[1] * (grad.ndim - 1))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        optimizer.step()
        told.append(total)
        if step >= steps - steps // 4:
            for name, param in params.items():
                sums[name] += param.detach()
        if step % 100 == 99:
            print(step + 1, [round(float(loss), 4) for loss in torch.stack(told[-100:]).mean(0)], flush=True)
            if state is not None:
                kept = {"params": params, "optimizer": optimizer.state_dict(), "sums": sums, "told": told}
                kept |= {"generators": [generator.get_state() for generator in generators]}
                kept |= {"lost": [exchange.lost() for exchange in exchanges]}
                torch.save(kept, state.with_suffix(".new"))
                state.with_suffix(".new").replace(state)
    averaged = {name: (value / (steps // 4)).float() for name, value in sums.items()}
    columns = {
        "averaged": held_out(averaged, ids[1]),
        "held_out": held_out(params, ids[1]),
        "last": torch.stack(told[-100:]).mean(0).tolist(),
    }
    by_run = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {way: by_run[number * seeds : (number + 1) * seeds] for number, way in enumerate(WAYS)}


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Of each way against BF16, by measure: differences within the seeds, their interval, and what it says."""
    found: dict[str, Any] = {}
    for way in list(WAYS)[1:]:
        found[way] = {}
        for measure in runs[way][0]:
            pairs = zip(runs[way], runs["bf16"], strict=True)
            off = [one[measure] / base[measure] - 1 for one, base in pairs]
            middle, half = interval(off)
            found[way][measure] = {"off": off, "mean": middle, "half": half, "verdict": verdict(middle, half)}
    return found


def main() -> None:
    """Train all ways from all seeds, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=8, help="2 to 16")
    parser.add_argument("--state", type=Path, help="a file to go on from, if it is stopped")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = train(args.seeds, args.steps, text(), args.state)
    against = compared(runs)
    for way, measures in against.items():
        for measure, one in measures.items():
            print(f"{way:14s} {measure:9s} {one['mean']:+.4%} +- {one['half']:.4%} {one['verdict']}")
    results = {"steps": args.steps, "runs": runs, "against_bf16": against, "limit": LIMIT}
    write_result("sync_loss", CLAIM, results, ["--steps", str(args.steps), "--seeds", str(args.seeds)])


if __name__ == "__main__":
    main()

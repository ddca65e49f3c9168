"""Loss of training with gradients that two ranks send each other as BF16 and as FP8, with and without error feedback.

A small transformer in FP32 (two layers of width 64, bytes, 115,000 parameters) on text of this repository, in pairs:
equal weights, rows and rates, only the wire format differs. What two ranks send each other is computed by one process
(`reduced_together`; a test compares its bits with those of processes); each has half of the rows.

The measure was settled before the runs: two runs that differ in one bit end apart by some tenths of a percent, so
that the loss of last weights says little. Compared are the weights' mean over the last quarter of the steps, on
held-out rows of the same kind of text (every sixteenth block of 4 KiB), within each seed. Over the seeds their mean
difference has a 95 % interval (Student's t): inside of +-0.25 % FP8 is "within", outside "beyond", else "undecided".

python -m benchmarks.sync_loss --steps 2000 --seeds 12 --minutes 60
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import write_result
from benchmarks.exchanges import reduced_together
from tilewright.core.hardware import detect_machine
from tilewright.models.build import init_weights
from tilewright.models.decoder.config import DecoderConfig
from tilewright.models.decoder.decoder import Decoder
from tilewright.ops.kernels import Kernels
from tilewright.parallel.communicate.feedback import ErrorFeedback

CLAIM = "FP8 gradients on the wire end within 0.25 % of the loss of BF16 ones"
RANKS, ROWS, LENGTH, LIMIT, LR = 2, 4, 64, 0.0025, 3e-3
WAYS = {"bf16": ("bf16", False), "fp8": ("fp8", False), "fp8, feedback": ("fp8", True)}
HELD_OUT_ROWS, BLOCK, EVERY = 2048, 4096, 16
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t of a two-sided 95 % interval, of 1 to 15 degrees of freedom."""
CONFIG = DecoderConfig.of(
    vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=192, tie_embeddings=True
)


def text() -> tuple[Tensor, Tensor]:
    """Bytes of the repository's own documents and sources, in the order of their names: to train on, and held out."""
    root = Path(__file__).parents[1]
    paths = sorted([*(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")])
    ids = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()
    blocks = ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)
    held = torch.arange(len(blocks)) % EVERY == 0
    return blocks[~held].flatten(), blocks[held].flatten()


def rows(ids: Tensor, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Bytes from anywhere in the text [count, LENGTH], and those that follow them."""
    begins = torch.randint(0, len(ids) - LENGTH - 1, (count, 1), generator=generator)
    found = ids[begins + torch.arange(LENGTH + 1)]
    return {"input_ids": found[:, :-1].contiguous(), "labels": found[:, 1:].contiguous()}


def mean_loss(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """Of a batch, in nats."""
    return model.loss(batch).loss_sum / batch["labels"].numel()


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
    """The exchange of two ranks' gradients, each a flat tensor in which a parameter begins with a tile."""

    def __init__(self, params: list[Tensor], wire: Any, fed: bool, kernels: Kernels) -> None:
        self._params, self._wire, self._kernels = params, wire, kernels
        self._begins, self._size = [], 0
        for param in params:
            self._begins.append(self._size)
            self._size += -(-param.numel() // 128) * 128
        self._feedback = [ErrorFeedback() for _ in range(RANKS)] if fed else None

    def flat(self) -> Tensor:
        """A rank's gradients, which are taken from the parameters."""
        out = torch.zeros(self._size)
        for begin, param in zip(self._begins, self._params, strict=True):
            assert param.grad is not None, "each is used"
            out[begin : begin + param.numel()] = param.grad.flatten()
            param.grad = None
        return out

    def sum(self, flats: list[Tensor]) -> None:
        """Give the parameters the sum of the ranks' gradients."""
        first = reduced_together(flats, self._wire, self._kernels, self._feedback)
        for begin, param in zip(self._begins, self._params, strict=True):
            param.grad = first[begin : begin + param.numel()].view_as(param).clone()
        for feedback in self._feedback or ():
            feedback.commit()


def held_out(model: Decoder, ids: Tensor) -> float:
    """The loss on the same held-out rows each time."""
    generator = torch.Generator().manual_seed(0)
    batches = [rows(ids, 64, generator) for _ in range(HELD_OUT_ROWS // 64)]
    with torch.no_grad():
        return statistics.mean(mean_loss(model, batch).item() for batch in batches)


def train(way: str, seed: int, steps: int, ids: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Held-out losses after so many steps, of averaged weights and the last ones, and the mean of the last hundred."""
    wire, fed = WAYS[way]
    kernels = Kernels(detect_machine("cpu"), compile=False)
    model = Decoder(CONFIG, kernels)
    init_weights(model, seed)
    params = list(model.parameters())
    ranks, optimizer = Ranks(params, wire, fed, kernels), torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    sums = [torch.zeros_like(param, dtype=torch.float64) for param in params]
    averaged = steps // 4
    for step in range(steps):
        flats, total = [], 0.0
        for _ in range(RANKS):
            loss = mean_loss(model, rows(ids[0], ROWS, generator)) / RANKS
            loss.backward()
            total += loss.item()
            flats.append(ranks.flat())
        ranks.sum(flats)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        rate = LR * min(1.0, (step + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step >= steps - averaged:
            torch._foreach_add_(sums, [param.detach().double() for param in params])
    last = held_out(model, ids[1])
    with torch.no_grad():
        for param, total_of in zip(params, sums, strict=True):
            param.copy_(total_of / averaged)
    return {"averaged": held_out(model, ids[1]), "held_out": last, "last": statistics.mean(losses[-100:])}


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
    """Train all ways from all seeds, and write the result after each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=12, help="16 at most")
    parser.add_argument("--minutes", type=float, default=60.0, help="no seed begins that would end later")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids, began = text(), time.monotonic()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        spent = time.monotonic() - began
        if seed and spent * (seed + 1) / seed > 60 * args.minutes:
            print(f"no time for seed {seed}")
            break
        for way, found in runs.items():
            found.append(train(way, seed, args.steps, ids))
            print(way, seed, found[-1], flush=True)
        if seed:
            against = compared(runs)
            for way, measures in against.items():
                for measure, one in measures.items():
                    print(f"{way:14s} {measure:9s} {one['mean']:+.4%} +- {one['half']:.4%} {one['verdict']}")
            write_result("sync_loss", CLAIM, {"seeds": seed + 1, "runs": runs, "against_bf16": against, "limit": LIMIT})


if __name__ == "__main__":
    main()

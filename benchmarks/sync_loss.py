"""Loss of training with gradients that two ranks send each other as BF16 and as FP8, with and without error feedback.

A small transformer in FP32 (two layers of width 64, bytes, 115,000 parameters) on text of this repository, 2,000 steps,
three seeds, in pairs: equal weights, rows and rates, only the wire format differs. What two
ranks send each other is computed by one process (`reduced_together`; a test compares its bits with those of processes);
each has half of the rows.

python -m benchmarks.sync_loss --steps 2000 --seeds 3
"""

import argparse
import math
import statistics
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
HELD_OUT_ROWS = 2048
CONFIG = DecoderConfig.of(
    vocab_size=256, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=192, tie_embeddings=True
)


def text() -> Tensor:
    """Bytes of the repository's own documents and sources, in the order of their names."""
    root = Path(__file__).parents[1]
    paths = sorted([*(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")])
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()


def rows(ids: Tensor, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Bytes from anywhere in the text [count, LENGTH], and those that follow them."""
    begins = torch.randint(0, len(ids) - LENGTH - 1, (count, 1), generator=generator)
    found = ids[begins + torch.arange(LENGTH + 1)]
    return {"input_ids": found[:, :-1].contiguous(), "labels": found[:, 1:].contiguous()}


def mean_loss(model: Decoder, batch: dict[str, Tensor]) -> Tensor:
    """Of a batch, in nats."""
    return model.loss(batch).loss_sum / batch["labels"].numel()


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


def train(way: str, seed: int, steps: int, ids: Tensor) -> dict[str, float]:
    """The loss on held-out rows after so many steps, and the mean of the last hundred."""
    wire, fed = WAYS[way]
    kernels = Kernels(detect_machine("cpu"), compile=False)
    model = Decoder(CONFIG, kernels)
    init_weights(model, seed)
    params = list(model.parameters())
    ranks, optimizer = Ranks(params, wire, fed, kernels), torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    held, ids = ids[: len(ids) // 20], ids[len(ids) // 20 :]
    losses = []
    for step in range(steps):
        flats, total = [], 0.0
        for _ in range(RANKS):
            loss = mean_loss(model, rows(ids, ROWS, generator)) / RANKS
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
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        batches = [rows(held, 64, generator) for _ in range(HELD_OUT_ROWS // 64)]
        held_out = statistics.mean(mean_loss(model, batch).item() for batch in batches)
    return {"held_out": held_out, "last": statistics.mean(losses[-100:])}


def main() -> None:
    """Train all ways from all seeds, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = text()
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        for way, found in runs.items():
            found.append(train(way, seed, args.steps, ids))
            print(way, seed, found[-1], flush=True)
    off = {
        way: [one["held_out"] / base["held_out"] - 1 for one, base in zip(found, runs["bf16"], strict=True)]
        for way, found in runs.items()
    }
    for way, found in off.items():
        print(f"{way:15s} {[round(one['held_out'], 4) for one in runs[way]]} {[f'{100 * x:+.3f} %' for x in found]}")
    within = {way: abs(statistics.mean(found)) <= LIMIT for way, found in off.items()}
    write_result("sync_loss", CLAIM, {"runs": runs, "against_bf16": off, "within": within, "limit": LIMIT})


if __name__ == "__main__":
    main()

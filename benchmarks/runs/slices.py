"""Slices inside a layer, together and each left out: peak memory and seconds of a step, for short and for long rows.

A decoder under the layer-major executor, with 8-bit moments and BF16 weights: little else is in memory. Rows hold
packed documents; short and long rows make the same number of tokens. A peak is that of the largest part alone, so what
a slice saves is seen where the others are there already. Contenders:

  whole           every MLP, all scores and all logits at once; layer inputs exact and in memory
  all             MLPs in 8 parts, 256 query rows and 8 MiB of logits at a time, layer inputs on disk
  without X       all but `memory.mlp_chunks`, `memory.attention_block`, `memory.loss_chunk_bytes` or
  `memory.offload_activations` inputs in fp8   all, with layer inputs in memory in 8 bits

Each has a process of its own, which takes a step when it is its turn. `peak` is the kernel's mark of the whole process
in that step, `above` how far that is over what the process held before the step.

python -m benchmarks.runs.slices [--rounds 3] [--short 256] [--long 4096] [--compile] [--tiny] [--only whole all]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine_kind, spread, write_result
from benchmarks.loops import Batch, executor_of, token_batch
from benchmarks.worker import RETURNS_FREED, TurnTaker, contest, take_turns
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.units import format_bytes

CLAIM = "without any one of the chunkings the peak of long rows is higher; the seconds that each costs are reported"
WHOLE = {"memory.loss_chunk_bytes": "64GiB"}
SLICES = {
    "memory.mlp_chunks": "8",
    "memory.attention_block": "256",
    "memory.loss_chunk_bytes": "8MiB",
    "memory.offload_activations": "disk",
}
CONTENDERS = {
    "whole": WHOLE,
    "all": SLICES,
    **{
        f"without {left_out.removeprefix('memory.')}": WHOLE | {k: v for k, v in SLICES.items() if k != left_out}
        for left_out in SLICES
    },
    "inputs in fp8": SLICES | {"memory.offload_activations": "none", "train.checkpoint_inputs": "fp8"},
}
MICRO, TOKENS, DOCUMENTS, WARMUP = 2, 4096, 4, 1
"""Micro-batches a step, tokens in each, documents in a row, steps before those that count."""
SHAPE = {"dim": "256", "num_layers": "4", "num_heads": "4", "ffn_dim": "1024"}
VOCAB = "4096"
TINY = {"dim": "64", "num_layers": "2", "num_heads": "2", "ffn_dim": "128"}


def recipe_of(name: str, args: argparse.Namespace) -> Any:
    """Recipe slice_cpu with a contender's settings."""
    from tilewright.core.config.load import load_recipe

    shape = {f"model.{key}": value for key, value in (TINY if args.tiny else SHAPE).items()}
    vocab = {"data.vocab_size": "512" if args.tiny else VOCAB}
    settings = {"run.device": "cpu", "run.name": "benchmark"} | shape | vocab | CONTENDERS[name]
    return load_recipe("slice_cpu", settings, environ={}).recipe


def microbatches(step: int, vocab: int, length: int, tokens: int) -> list[Batch]:
    """Rows of random tokens, each of several documents of one length."""
    made, rows = [], max(tokens // length, 1)
    inside = length // DOCUMENTS
    place = torch.arange(length).expand(rows, -1)
    for micro in range(MICRO):
        batch = token_batch(vocab, rows, length, 100 * step + micro)
        made.append(batch | {"positions": place % inside, "segments": (place // inside).int()})
    return made


def worker(name: str, length: int, args: argparse.Namespace) -> None:
    """Warm up, then take a step when it is its turn; tell seconds, peak bytes and loss of each."""
    from tilewright.memory.tracking.process_memory import make_probe

    recipe = recipe_of(name, args)
    with tempfile.TemporaryDirectory() as folder:
        executor = executor_of(recipe, args.compile, Path(folder))
        probe = make_probe(torch.device("cpu"))

        def turn(step: int) -> dict[str, float]:
            batches = microbatches(step, recipe.data.vocab_size, length, args.tokens)
            held, start = probe.current(), time.perf_counter()
            with executor.memory_tracker.phase("step"):  # its boundaries inside reset the mark, so it keeps the peaks
                loss = executor.step(batches, recipe.optim.lr).loss
            seconds = time.perf_counter() - start
            peak = max(executor.memory_tracker.snapshot(None, None)["phases"].values())
            return {"step_s": seconds, "peak_bytes": peak, "above_bytes": peak - held, "loss": loss}

        take_turns(turn, WARMUP)


def compared(length: int, args: argparse.Namespace) -> dict[str, Any]:
    """All contenders at one length of rows, in turns."""
    takers = {}
    for name in (name for name in CONTENDERS if not args.only or name in args.only):
        flags = ["--tokens", str(args.tokens), *["--tiny"] * args.tiny, *["--compile"] * args.compile]
        arguments = ["--worker", name, "--length", str(length), *flags]
        takers[name] = TurnTaker(name, "runs.slices", *arguments, environ=os.environ | RETURNS_FREED)
    for taker in takers.values():
        for _ in range(WARMUP):
            taker.answer()
    rows = contest(takers, args.rounds)
    return {name: summary(found, rows.get("whole")) for name, found in rows.items()}


def summary(rows: list[dict[str, float]], whole: list[dict[str, float]] | None) -> dict[str, Any]:
    """Peaks, seconds and last loss of a contender, and both as shares of the whole."""
    found: dict[str, Any] = {name: spread([row[name] for row in rows]) for name in ("step_s", "above_bytes")}
    found["peak_bytes"] = max(row["peak_bytes"] for row in rows)
    found["losses"] = [row["loss"] for row in rows]
    if whole is not None:
        for name in ("step_s", "above_bytes"):
            shares = [row[name] / base[name] for row, base in zip(rows, whole, strict=True)]
            found[f"{name}_of_whole"] = spread(shares)
    return found


def show(title: str, found: dict[str, Any]) -> None:
    """A table for the screen."""
    print(f"\n{title}\n{'':<18}{'peak':>12}{'above':>12}{'of whole':>10}{'step':>9}{'of whole':>10}{'loss':>9}")
    for name, row in found.items():
        shares = [row.get(f"{key}_of_whole", {"median": float("nan")})["median"] for key in ("above_bytes", "step_s")]
        print(
            f"{name:<18}{format_bytes(row['peak_bytes']):>12}{format_bytes(row['above_bytes']['median']):>12}"
            f"{shares[0]:>10.1%}{row['step_s']['median']:>8.2f}s{shares[1]:>10.2f}{row['losses'][-1]:>9.4f}"
        )


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", type=int, default=256)
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=[])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.length, args)
        return
    tune_cpu_runtime()
    results: dict[str, Any] = {
        "unit": "bytes of the whole process; seconds per step",
        "shape": {**(TINY if args.tiny else SHAPE), "micro_batches": MICRO, "tokens": args.tokens},
        "documents_a_row": DOCUMENTS, "compiled": args.compile, "rounds": args.rounds,
    }  # fmt: skip
    for title, length in (("short", args.short), ("long", args.long)):
        results[title] = {"row_tokens": length, "contenders": compared(length, args)}
        show(f"{title}: rows of {length} tokens", results[title]["contenders"])
    if not args.tiny:
        write_result(f"slices_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()

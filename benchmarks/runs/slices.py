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
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine_kind, spread, write_result
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
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""For all contenders: what is freed goes back to the system, so that the peak is what was needed."""


def recipe_of(name: str, args: argparse.Namespace) -> Any:
    """Recipe slice_cpu with a contender's settings."""
    from tilewright.core.config.load import load_recipe

    shape = {f"model.{key}": value for key, value in (TINY if args.tiny else SHAPE).items()}
    vocab = {"data.vocab_size": "512" if args.tiny else VOCAB}
    settings = {"run.device": "cpu", "run.name": "benchmark"} | shape | vocab | CONTENDERS[name]
    return load_recipe("slice_cpu", settings, environ={}).recipe


def microbatches(step: int, vocab: int, length: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Rows of random tokens, each of several documents of one length."""
    made, rows = [], max(tokens // length, 1)
    inside = length // DOCUMENTS
    place = torch.arange(length).expand(rows, -1)
    for micro in range(MICRO):
        generator = torch.Generator().manual_seed(100 * step + micro)
        ids = torch.randint(0, vocab, (rows, length + 1), generator=generator)
        batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
        made.append(batch | {"positions": place % inside, "segments": (place // inside).int()})
    return made


def make_executor(recipe: Any, compiled: bool, folder: Path) -> Any:
    """Model, optimizer and executor, as a run builds them."""
    from tilewright.core.hardware import detect_machine
    from tilewright.memory.chunked_mlp import chunk_mlps
    from tilewright.memory.offload.lazy_params import fill_buffers, to_placeholders
    from tilewright.memory.tracking.tracker import MemoryTracker
    from tilewright.models.build import build_model
    from tilewright.ops.kernels import Kernels
    from tilewright.optim.adam import DeepSeekAdam
    from tilewright.optim.clip import GradClip
    from tilewright.optim.param_groups import decay_groups
    from tilewright.parallel.world import World
    from tilewright.precision.convert import convert
    from tilewright.precision.policy.policy import Policy
    from tilewright.training.components.model import first_values
    from tilewright.training.executor.base import ExecutorInputs
    from tilewright.training.executor.kinds import layer_major_executor

    memory, optim = recipe.memory, recipe.optim
    sizes = {"loss_chunk_bytes": memory.loss_chunk_bytes, "attention_block": memory.attention_block}
    kernels = Kernels(detect_machine("cpu"), compile=compiled, **sizes)
    model = build_model(recipe.model, recipe.data.vocab_size, kernels, "meta")
    values = first_values(recipe, model)
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters="bf16"), kernels=kernels)
    to_placeholders(model, "cpu")
    fill_buffers(model, values)
    model.train()
    model.checkpoint_inputs = recipe.train.checkpoint_inputs
    if compiled:
        model.compile_blocks()
    if memory.mlp_chunks > 1:
        chunk_mlps(model, memory.mlp_chunks, print, compile=compiled)
    optimizer = DeepSeekAdam(
        decay_groups(model, optim.weight_decay), lr=optim.lr, betas=optim.betas, moments=optim.moments,
        master=optim.master_weights, kernels=kernels,
    )  # fmt: skip
    return layer_major_executor(
        ExecutorInputs(
            recipe, model, optimizer, None, GradClip(optim.clip_norm), None, None, MemoryTracker("cpu"), kernels,
            World.alone(), folder, values,
        )
    )  # fmt: skip


def worker(name: str, length: int, args: argparse.Namespace) -> None:
    """Warm up, then take a step for each line on stdin; tell seconds, peak bytes and loss of each."""
    from tilewright.memory.tracking.process_memory import make_probe

    recipe = recipe_of(name, args)
    with tempfile.TemporaryDirectory() as folder:
        executor = make_executor(recipe, args.compile, Path(folder))
        probe = make_probe(torch.device("cpu"))
        for step in range(10**9):
            if step >= WARMUP and not sys.stdin.readline():
                return
            batches = microbatches(step, recipe.data.vocab_size, length, args.tokens)
            held, start = probe.current(), time.perf_counter()
            with executor.memory_tracker.phase(
                "step"
            ):  # the memory tracker's boundaries inside reset the mark, so it keeps the peaks
                loss = executor.step(batches, recipe.optim.lr).loss
            seconds = time.perf_counter() - start
            peak = max(executor.memory_tracker.snapshot(None, None)["phases"].values())
            told = {"step_s": seconds, "peak_bytes": peak, "above_bytes": peak - held, "loss": loss}
            print(json.dumps(told), flush=True)


def start(name: str, length: int, args: argparse.Namespace) -> subprocess.Popen:
    """A contender's process."""
    command = [sys.executable, "-m", "benchmarks.runs.slices", "--worker", name, "--length", str(length)]
    command += ["--tokens", str(args.tokens)] + ["--tiny"] * args.tiny + ["--compile"] * args.compile
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | ALLOCATOR, **pipes)


def answer(name: str, process: subprocess.Popen) -> dict[str, float]:
    """What the process tells of its next step."""
    for line in process.stdout or ():
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{name} ended with {process.wait()}")


def contest(length: int, args: argparse.Namespace) -> dict[str, Any]:
    """All contenders at one length of rows, in turns."""
    names = [name for name in CONTENDERS if not args.only or name in args.only]
    processes = {name: start(name, length, args) for name in names}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for name, process in processes.items():  # warm-up, not counted
        for _ in range(WARMUP):
            answer(name, process)
    for _ in range(args.rounds):
        for name, process in processes.items():
            process.stdin.write("\n")
            process.stdin.flush()
            rows[name].append(answer(name, process))
    for process in processes.values():
        process.stdin.close()
        process.wait()
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
        results[title] = {"row_tokens": length, "contenders": contest(length, args)}
        show(f"{title}: rows of {length} tokens", results[title]["contenders"])
    if not args.tiny:
        write_result(f"slices_{machine_kind()}", CLAIM, results)


if __name__ == "__main__":
    main()

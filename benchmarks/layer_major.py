"""Layer-major execution on a CPU: whole-process peak, step time and losses of a decoder of about 200M parameters.

Contenders, each in a process of its own that takes a few steps when it is its turn:
  autocast       a plain PyTorch loop over Hugging Face's Llama: FP32 weights and AdamW (fused), BF16 autocast
  standard       ours, bf16_mixed, FP32 weights and states, standard executor
  recomputed     the same with every layer recomputed (full activation checkpointing)
  layer_major    the same formats, layer by layer, clipping lagged: nothing offloaded
  exact          the same with exact clipping, which takes a second backward pass
  bits8          layer_major with 8-bit moments and BF16 weights, stochastically rounded: recipe slice_cpu
  bits8_inputs   bits8, layer inputs in 8 bits
  bits8_disk     bits8, optimizer states on disk
  bits8_away     bits8, optimizer states and layer inputs on disk
All start from the same weights and take the same rows, 4 micro-batches of 2 x 512 tokens, vocabulary 16384.

cap: the same contenders in processes whose data segment may not grow beyond --cap bytes: who finishes three steps.

python -m benchmarks.layer_major [contest cap] [--rounds 5] [--cap 2GiB] [--compile] [--tiny] [--only autocast bits8]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import machine_kind, spread, write_result
from tilewright.core.env import tune_cpu_runtime
from tilewright.core.units import format_bytes, parse_bytes

CLAIM = (
    "layer-major with 8-bit states: 70 % less peak memory than FP32 AdamW under BF16 autocast at no more than 1.5x its "
    "step time, with the same losses; without low-bit states at least 0.95x the speed of full activation checkpointing"
)
MICRO, ROWS, SEQ, TEXTS = 4, 2, 512, 3
"""Micro-batches a step, rows in each, tokens in a row, and different steps before rows come again (so losses fall)."""
WARMUP, CAPPED_STEPS = 2, 3
TINY = {
    "data.vocab_size": "512",
    "model.dim": "64",
    "model.num_layers": "3",
    "model.num_heads": "2",
    "model.ffn_dim": "128",
}
STANDARD = {
    "memory.executor": "standard", "optim.clip": "exact", "optim.moments": "fp32", "optim.master": "fp32",
}  # fmt: skip
WIDE = {"optim.moments": "fp32", "optim.master": "fp32"}
OURS = {
    "standard": STANDARD,
    "recomputed": STANDARD | {"train.activation_checkpoint": "full"},
    "layer_major": WIDE,
    "exact": WIDE | {"optim.clip": "exact"},
    "bits8": {},
    "bits8_inputs": {"train.checkpoint_inputs": "fp8"},
    "bits8_disk": {"memory.states": "disk"},
    "bits8_away": {"memory.states": "disk", "memory.inputs": "disk"},
}
CONTENDERS = ("autocast", *OURS)
PAIRS = (
    ("bits8", "autocast"),
    ("bits8", "standard"),
    ("layer_major", "recomputed"),
    ("bits8_disk", "autocast"),
    ("bits8_away", "autocast"),
)
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""For all contenders: what is freed goes back to the system, so that the peak is what was needed."""

Step = Callable[[int], float]


def recipe_of(name: str, tiny: bool) -> Any:
    """Recipe slice_cpu with a contender's settings."""
    from tilewright.core.load import load_recipe

    settings = {"run.device": "cpu", "run.name": "benchmark"} | OURS.get(name, {}) | (TINY if tiny else {})
    return load_recipe("slice_cpu", settings, environ={}).recipe


def microbatches(step: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """The rows of a step."""
    made = []
    for micro in range(MICRO):
        generator = torch.Generator().manual_seed(100 * (step % TEXTS) + micro)
        rows = torch.randint(0, vocab, (ROWS, SEQ + 1), generator=generator)
        made.append({"input_ids": rows[:, :-1], "labels": rows[:, 1:].contiguous()})
    return made


def ours(name: str, compiled: bool, tiny: bool) -> Step:
    """Our decoder under the recipe's formats, optimizer and executor."""
    from tilewright.core.hardware import detect_machine
    from tilewright.memory.lazy import fill_buffers, vacate
    from tilewright.memory.ledger import Ledger
    from tilewright.models.build import build_model, init_weights
    from tilewright.ops.kernels import Kernels
    from tilewright.optim.adam import DeepSeekAdam
    from tilewright.optim.clip import GradClip
    from tilewright.optim.groups import decay_groups
    from tilewright.precision.convert import convert
    from tilewright.precision.policy import Policy
    from tilewright.training import slicing
    from tilewright.training.step import StandardExecutor

    recipe = recipe_of(name, tiny)
    optim, vocab, folder = recipe.optim, recipe.data.vocab_size, Path("runs") / "benchmark"
    kernels = Kernels(detect_machine("cpu"), {}, compile=compiled, loss_tile=recipe.memory.loss_tile)
    sliced = slicing.comes_in_slices(recipe)
    model = build_model(recipe.model, vocab, kernels, "meta" if sliced else "cpu")
    values = slicing.first_values(recipe, model)
    if values is None:
        init_weights(model, recipe.run.seed)
    parameters = "" if optim.master == "fp32" else "bf16"
    convert(model, Policy.from_section(recipe.precision, "cpu", parameters=parameters), kernels=kernels)
    if values is not None:
        vacate(model, "cpu")
        fill_buffers(model, values)
    model.train()
    model.activation_checkpoint = recipe.train.activation_checkpoint
    model.checkpoint_inputs = recipe.train.checkpoint_inputs
    if compiled:
        model.compile_blocks()
    optimizer = DeepSeekAdam(
        decay_groups(model, optim.weight_decay), lr=optim.lr, betas=optim.betas, moments=optim.moments,
        master=optim.master, kernels=kernels,
    )  # fmt: skip
    clip = GradClip(optim.clip_norm)
    if sliced:
        cut = slicing.slice_up(recipe, model, optimizer, torch.device("cpu"), folder=folder, values=values)
        executor = slicing.make_executor(
            recipe, model, cut, optimizer,
            clip=clip, ledger=Ledger("cpu"), kernels=kernels, weights=None, folder=folder,
        )  # fmt: skip
        executor.ledger = None  # phases reset the system's mark of the largest resident set, which is what is told here
    else:
        executor = StandardExecutor(model, optimizer, clip=clip)
    return lambda count: executor.step(microbatches(count, vocab), optim.lr).loss


def autocast(tiny: bool) -> Step:
    """The plain loop, from the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tilewright.models.build import build_model
    from tilewright.models.first_values import random_values

    recipe = recipe_of("bits8", tiny)
    shape, optim, vocab = recipe.model, recipe.optim, recipe.data.vocab_size
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_heads,
        max_position_embeddings=SEQ, rms_norm_eps=shape.norm_eps, rope_theta=shape.rope_theta,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    values = random_values(build_model(shape, vocab), recipe.run.seed)
    with torch.no_grad():
        values({name: param.data for name, param in model.named_parameters()})
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )

    def step(count: int) -> float:
        total = 0.0
        for batch in microbatches(count, vocab):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(input_ids=batch["input_ids"]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
            (loss / MICRO).backward()
            total += loss.item() / MICRO
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def worker(name: str, args: argparse.Namespace) -> None:
    """Warm up, then take a step for each line on stdin; tell seconds, peak bytes and loss of each."""
    if args.cap_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (args.cap_bytes, args.cap_bytes))
    step = autocast(args.tiny) if name == "autocast" else ours(name, args.compile, args.tiny)
    for count in range(10**9):
        if count >= WARMUP and not sys.stdin.readline():
            return
        start = time.perf_counter()
        loss = step(count)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step_s": time.perf_counter() - start, "peak_bytes": peak, "loss": loss}), flush=True)


def start(name: str, args: argparse.Namespace, cap: int = 0) -> subprocess.Popen:
    """A contender's process."""
    command = [sys.executable, "-m", "benchmarks.layer_major", "--worker", name, "--cap-bytes", str(cap)]
    command += ["--tiny"] * args.tiny + ["--compile"] * args.compile
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE if cap else None}
    return subprocess.Popen(command, text=True, env=os.environ | ALLOCATOR, **pipes)


def answer(process: subprocess.Popen) -> dict[str, float] | None:
    """What the process tells of its next step; None where it ended."""
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    return None


def contest(args: argparse.Namespace) -> dict[str, Any]:
    """Steps in turns: seconds, peaks and losses by contender, and the claimed pairs."""
    tune_cpu_runtime()
    processes, found = {}, {name: [] for name in args.only}
    for name in args.only:
        processes[name] = start(name, args)
        found[name] += [answer(processes[name]) for _ in range(WARMUP)]
        print(f"{name}: {json.dumps(found[name][-1])}", flush=True)
    for _ in range(args.rounds):
        for name, process in processes.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            found[name].append(answer(process))
        print({name: round(rows[-1]["step_s"], 2) for name, rows in found.items()}, flush=True)
    for process in processes.values():
        process.stdin.close()
        process.wait()
    results: dict[str, Any] = {"tokens_per_step": MICRO * ROWS * SEQ, "compiled": args.compile}
    for name, rows in found.items():
        results[name] = {
            "step_s": spread([row["step_s"] for row in rows[WARMUP:]]),
            "peak_bytes": rows[-1]["peak_bytes"],
            "losses": [round(row["loss"], 4) for row in rows],
        }
    for one, other in PAIRS:
        if one in found and other in found:
            results[f"{one} against {other}"] = compare(found[one], found[other])
    return results


def compare(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, Any]:
    """Peak, step time (round by round) and losses of one contender against another's."""
    pairs = list(zip(one, other, strict=True))
    return {
        "peak_change": one[-1]["peak_bytes"] / other[-1]["peak_bytes"] - 1,
        "step_time_ratio": spread([a["step_s"] / b["step_s"] for a, b in pairs[WARMUP:]]),
        "largest_loss_gap": max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs),
    }


def capped(args: argparse.Namespace) -> dict[str, Any]:
    """Who finishes a few steps under a hard limit of the data segment; how the others end."""
    tune_cpu_runtime()
    results: dict[str, Any] = {"limit_bytes": parse_bytes(args.cap), "steps": CAPPED_STEPS}
    for name in args.only:
        process = start(name, args, results["limit_bytes"])
        out, err = process.communicate("go\n" * (CAPPED_STEPS - WARMUP))
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        results[name] = {"finished": process.returncode == 0 and len(rows) == CAPPED_STEPS, "steps": len(rows)}
        if rows:
            results[name]["peak_bytes"] = rows[-1]["peak_bytes"]
        if process.returncode:
            results[name]["error"] = (err.strip().splitlines() or [f"signal {-process.returncode}"])[-1][:200]
        print(f"{name} under {format_bytes(results['limit_bytes'])}: {results[name]}", flush=True)
    return results


def main() -> None:
    """Run the parts asked for, or one contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["contest", "cap"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cap", default="2GiB")
    parser.add_argument("--cap-bytes", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--worker", choices=CONTENDERS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args)
        return
    name = "layer_major_compiled" if args.compile else "layer_major"
    if "contest" in args.parts:
        write_result(f"{name}_{machine_kind()}", CLAIM, contest(args))
    if "cap" in args.parts:
        write_result(f"{name}_cap_{machine_kind()}", CLAIM, capped(args))


if __name__ == "__main__":
    main()
